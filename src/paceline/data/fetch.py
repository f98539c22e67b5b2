"""Fetches one batch, in a DataLoader worker or in the rank's own process, with the same result in both.

An error in a sample is returned as a :class:`Failure`, and the rank's own process raises it.
"""

from __future__ import annotations

import copy
import traceback
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from torch.utils.data import Dataset, TensorDataset, default_collate, get_worker_info

from paceline.core.data_position import emptied
from paceline.core.messages import with_article
from paceline.core.rng import derive_seed, fork_cpu_rng, seed_cpu
from paceline.core.virtual_ranks import Slices
from paceline.data.slices import Slice
from paceline.errors import DataError

Collate = Callable[[list[Any]], Any]


class Fetch(Dataset[Any]):
    """Fetches a batch for each :class:`Slice`; an empty slice gives ``None`` without running user code.

    If a ticket has an example, an empty batch comes with its batch.
    """

    def __init__(self, dataset: Any, collate_fn: Collate, seed: int, rank: int) -> None:
        self.dataset = dataset
        self.collate_fn = collate_fn
        self.seed = seed
        self.rank = rank
        # Reading tensors draws no random numbers, and seeding would dominate the cost of small batches.
        self.draws = type(dataset) is not TensorDataset or collate_fn is not default_collate

    def __getitem__(self, ticket: Slice | Slices) -> Any:
        batch = gathered(map(self._batch, ticket), ticket.seeds) if isinstance(ticket, Slices) else self._batch(ticket)
        if ticket.example is None or isinstance(batch, Failure):
            return batch
        with own_streams():
            return with_empty(batch, self.collate_fn, partial(self._sample, ticket.example))

    def _sample(self, index: int) -> Any:
        together = getattr(self.dataset, "__getitems__", None)
        return together([index])[0] if together else self.dataset[index]

    def _batch(self, share: Slice) -> Any:
        if not share:
            return None
        if not self.draws:
            return self._fetch(share)
        with own_streams():
            seed_cpu(derive_seed("batch", self.seed, share.epoch, share.number, share.share))
            return self._fetch(share)

    def _fetch(self, share: Slice) -> Any:
        sample: int | None = None
        try:
            if together := getattr(self.dataset, "__getitems__", None):
                return self.collate_fn(together(list(share)))
            samples = []
            for sample in share:
                samples.append(self.dataset[sample])
            sample = None  # an error in collate_fn is not caused by the last sample
            return self.collate_fn(samples)
        except Exception as error:
            where = f"batch {share.number} of epoch {share.epoch}"
            samples_text = f"samples {listed(share)} ({where})" if sample is None else f"sample {sample} of {where}"
            return Failure.of(error, self.rank, samples_text)


@dataclass
class Failure:
    """An error in the fetch of a batch: its message and its cause."""

    message: str
    cause: BaseException

    @classmethod
    def of(cls, error: Exception, rank: int, subject: str) -> Failure:
        """Describe `error`. A worker sends the traceback as text, because not every error can be pickled."""
        worker = get_worker_info()
        where = f"rank {rank}" if worker is None else f"rank {rank}, worker {worker.id}"
        reason = f"{type(error).__name__}: {error}"
        message = f"{where}: {subject} could not be loaded: {reason}; fix or remove that data"
        if worker is None:
            return cls(message, error)
        return cls(message, RuntimeError("in the worker:\n" + "".join(traceback.format_exception(error))))

    def throw(self) -> None:
        """Raise the failure as a :class:`DataError`."""
        raise DataError(self.message) from self.cause


def gathered(batches: Iterable[Any], seeds: list[int]) -> Slices | Failure:
    """Return the batches of a rank's slices as a list, or the first failure among them."""
    slices = Slices([], seeds)
    for batch in batches:
        if isinstance(batch, Failure):
            return batch
        slices.append(batch)
    return slices


class WithEmpty(NamedTuple):
    """A fetched batch, together with an empty batch of the same structure, or the reason why there is none."""

    batch: Any
    empty: Any
    reason: str


def with_empty(batch: Any, collate: Collate, fetch: Callable[[], Any]) -> WithEmpty:
    """Return `batch` with an empty batch, made by comparing batches of two and three copies of a fetched sample."""
    cuts: list[bool] = []
    kept: list[Any] = []
    try:
        sample = fetch()
        # Copies, because `collate` may change its samples.
        few, more = (collate([copy.deepcopy(sample) for _ in range(count)]) for count in (2, 3))
        empty = emptied(few, more, cuts, kept)
        reason = "" if any(cuts) else "no tensor has one row per sample"
        if kept:
            reason = f"it contains {with_article(type(kept[0]).__name__)}, which cannot be emptied"
    except Exception as error:  # from the dataset, from collate_fn, or from a type that cannot be cut
        empty, reason = None, f"{type(error).__name__}: {error}"
    return WithEmpty(batch, None if reason else empty, reason)


def own_streams() -> AbstractContextManager[None]:
    """Keep a fetch in the rank's own process from changing the rank's random streams."""
    return fork_cpu_rng() if get_worker_info() is None else nullcontext()


def listed(indices: list[int]) -> str:
    """Return the indices as text, shortened if there are many."""
    shown = ", ".join(map(str, indices[:8]))
    return f"{shown}, … ({len(indices)} in all)" if len(indices) > 8 else shown
