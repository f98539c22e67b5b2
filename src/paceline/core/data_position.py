"""The sources of batches and the steps that consumed them, shared by data loaders and the wrapper.

    a loader returns a batch ──► hand_over(source) ──► the next synchronized backward sends report() to the other ranks
    an optimizer steps, or a backward is synchronized ──► steps() grows: the loader's batches were consumed

Ranks are compared only when they communicate anyway, so a rank that uses a loader alone never waits.
"""

from __future__ import annotations

import copy
import dataclasses
import os
import sys
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache
from types import FrameType
from typing import Any, NamedTuple, Protocol

from torch.nn.utils.rnn import PackedSequence
from torch.optim.optimizer import register_optimizer_step_post_hook

from paceline.core.missing_ranks import named_ranks, ranks_by_value
from paceline.core.rng import derive_seed
from paceline.core.torch_internals import never_compiled

SKIP = "call model.sync_gradients() instead of forward and backward if loader.slice_is_empty, or give drop_last=True"
"""Remedy for code that does not accept 0 rows."""


class Origin(NamedTuple):
    """The origin of a rank's latest batch, as whole numbers below 2**53, because they are sent as float64."""

    source: int = -1
    """Number of the loader, derived from the script line that creates it; -1 without a loader that the ranks share."""
    samples: int = -1
    """Length of the dataset; -1 for a stream."""
    batch_size: int = -1
    drop_last: int = -1
    seed: int = -1
    data: int = -1
    """Digest of the dataset."""
    order: int = -1
    """Digest of the epoch's order, if the seed does not determine it."""
    epoch: int = -1
    position: int = -1
    """Number of batches returned in this epoch."""
    stream: int = -1
    """Digest of the samples that a stream has yielded in this epoch; -1 if it is not compared."""


class Source(Protocol):
    """A source of batches; each of `world_size` ranks takes its part."""

    world_size: int
    key: int

    def origin(self) -> Origin:
        """Describe the current position."""


_DIFFERENCES = {
    "samples": (
        "samples in the dataset",
        "the loader splits the data among the ranks by itself, so give every rank the whole dataset",
    ),
    "batch_size": (
        "as the global batch size",
        "batch_size counts the samples of all ranks together, so give every rank the same value",
    ),
    "drop_last": ("as drop_last", "give every rank the same value"),
    "seed": (
        "as the loader's seed",
        "the order has to be the same on every rank, so give all ranks the same seed (not the rank); augmentation "
        "differs by rank anyway",
    ),
    "data": (
        "as the digest of the dataset",
        "usually the script has split it by rank, or made it with random numbers that differ by rank; give every rank "
        "the same whole dataset, which the loader splits by itself, or, if it is already the same, set "
        "dataset.fingerprint to a string of your own",
    ),
    "epoch": ("as the loader's epoch", "call set_epoch() with the same epoch on all ranks"),
    "order": (
        "as the digest of the epoch's order",
        "usually order= draws from a generator that differs by rank; seed it with the epoch, and give every rank the "
        "same cost= and speed=",
    ),
    "position": ("batches taken from the loader", "use the same batches on all ranks"),
    "stream": (
        "as the digest of the stream's samples",
        "usually the dataset splits itself by rank, or shuffles with random numbers that differ by rank; give every "
        "rank the same whole stream, which GlobalBatchStream splits by itself, or, if only augmentation differs, set "
        "dataset.fingerprint to a string",
    ),
}
LIMIT = 2**52
"""Upper bound of the numbers in an :class:`Origin`."""


def short(number: int) -> int:
    """Return `number` modulo :data:`LIMIT`, which fits into an :class:`Origin`."""
    return number % LIMIT


def difference(origins: Mapping[int, Origin]) -> str | None:
    """Return a message that describes how the data of ranks with the same loader differ; None if they agree.

    Batches of different loaders cannot be compared.
    """
    if len({origin.source for origin in origins.values()}) > 1 or next(iter(origins.values())).source == -1:
        return None
    for name, (noun, remedy) in _DIFFERENCES.items():
        values = {rank: getattr(origin, name) for rank, origin in origins.items()}
        if len(set(values.values())) > 1:
            is_digest = name in ("data", "order", "stream")
            shown = {rank: f"{value:013x}" if is_digest else str(value) for rank, value in values.items()}
            return f"ranks differ in their data: {who_has(shown, noun)}; {remedy}"
    return None


def who_has(values: Mapping[int, Any], noun: str) -> str:
    """Return a text such as ``rank 0 has 3, ranks 1, 2 have 2 optimizer steps``."""
    groups = ranks_by_value(values.items())
    parts = [f"{named_ranks(ranks)} {'have' if len(ranks) > 1 else 'has'} {value}" for value, ranks in groups.items()]
    return f"{', '.join(parts)} {noun}"


# -- batches and steps of this process -----------------------------------------------------------------------------


class Taken:
    """The sources that have handed over batches since the last synchronized backward pass, and counts of steps."""

    def __init__(self) -> None:
        self.sources: dict[int, Source] = {}
        """Sources by key, in the order they handed over batches."""
        self.synchronizations = 0
        """Number of synchronized backward passes of all wrappers; equal on all ranks that train together."""
        self.optimizer_steps = 0
        self.weights = 0
        """Number of weighted micro-batches."""
        self.empty_slices: set[int] = set()
        """Keys of the sources whose latest batch has no samples for this rank."""


taken = Taken()
"""The counts of this process."""


def hand_over(source: Source) -> None:
    """Note that `source` has handed over a batch.

    Only batches returned in the main thread count, because the position of a prefetching thread depends on its speed.
    """
    if source.world_size > 1 and threading.current_thread() is threading.main_thread():
        taken.sources[source.key] = source


def report(size: int) -> Origin:
    """Return the report about the data since the last synchronization, for a group of `size` ranks.

    Several sources take turns, one per step, because a report has a fixed size.
    """
    split = [source for source in taken.sources.values() if source.world_size == size]
    return split[taken.synchronizations % len(split)].origin() if split else Origin()


def steps() -> int:
    """Return the number of optimizer steps and synchronized backward passes in this process since the first call."""
    _count_optimizer_steps()
    return taken.optimizer_steps + taken.synchronizations


@cache
def _count_optimizer_steps() -> None:
    @never_compiled
    def stepped(*_: Any) -> None:
        taken.optimizer_steps += 1

    register_optimizer_step_post_hook(stepped)


# -- numbers of loaders ----------------------------------------------------------------------------------------------

_made: Counter[int] = Counter()
"""Number of sources created by each line of the script. A line in a loop creates several."""


def key_of_caller() -> int:
    """Return a number that identifies a new source; ranks that create it at the same place get the same number.

    The place is the call stack outside this package, with file names but without folders, which may differ between
    hosts.
    """
    place = short(derive_seed("source", *_calls()))
    _made[place] += 1
    return short(derive_seed("source", place, _made[place]))


def _calls() -> Sequence[str]:
    calls = []
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        code = frame.f_code
        if not frame.f_globals.get("__name__", "").startswith("paceline."):
            calls.append(f"{os.path.basename(code.co_filename)}:{frame.f_lineno}:{code.co_name}")
        frame = frame.f_back
    return calls


# -- batches without samples, for ranks whose slice of a global batch is empty -----------------------------------------


def emptied(few: Any, more: Any, cuts: list[bool], kept: list[Any]) -> Any:
    """Return `few` with 0 rows: each tensor is cut in the dimensions that are larger in `more`, which has more rows.

    Numbers that differ become 0, because they are sums or counts. Appends to `cuts`, for each tensor, whether it was
    cut, and to `kept` the objects that cannot be cut.
    """

    def part(one: Any, other: Any) -> Any:
        return emptied(one, other, cuts, kept)

    if (shape := getattr(few, "shape", None)) == () or isinstance(few, int | float | complex):
        return few if few == more else few * 0
    if shape is not None:
        grows = [size != larger for size, larger in zip(shape, more.shape, strict=True)]
        cuts.append(any(grows))
        return few[tuple(slice(0 if is_cut else None) for is_cut in grows)]
    if isinstance(few, Mapping):
        empty: Any = copy.copy(few)
        for key, value in few.items():
            empty[key] = part(value, more[key])
        return empty
    if dataclasses.is_dataclass(few) and not isinstance(few, type):
        names = [field.name for field in dataclasses.fields(few) if field.init]
        return dataclasses.replace(few, **{name: part(getattr(few, name), getattr(more, name)) for name in names})
    if isinstance(few, list | tuple) and not isinstance(few, PackedSequence):
        if len(few) == len(more):
            parts: Any = map(part, few, more)
            return type(few)(*parts) if hasattr(few, "_fields") else type(few)(parts)
        if all(isinstance(value, int | float | str | bytes) for value in few):
            return type(few)()
    if not isinstance(few, str | bytes | None):
        kept.append(few)
    return few
