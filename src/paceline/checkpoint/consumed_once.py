"""Proves from a checkpoint's ledger that each sample was used exactly once per epoch, or says where it was not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from paceline import documents
from paceline.checkpoint.sample_ledger import Batches, Run
from paceline.digests import quick_digest
from paceline.rng import epoch_order

MOST_SAMPLES = 2**24
"""Of a larger data set the order is not made again, as that takes memory: its batches are counted alone."""


@dataclass(frozen=True)
class Epoch:
    """The use of one epoch of a source: of its `length` batches so many were `used`; `problems` is empty if once."""

    source: str
    epoch: int
    used: int
    length: int | None
    samples: int | None
    """Samples in the batches that were used; None where the order is not made from the seed."""
    ranks: tuple[int, ...]
    """Numbers of ranks that used them, run by run."""
    problems: tuple[str, ...]


def check(runs: Sequence[Run]) -> list[Epoch]:
    """Return how each epoch was used by `runs`, which led to one checkpoint after another."""
    names = sorted({name for run in runs for name in run.sources})
    return [epoch for name in names for epoch in _of_source(name, runs)]


def steps_done_again(runs: Sequence[Run]) -> list[tuple[int, int]]:
    """Return the first and last step of each series that is known to have been done before a run resumed ahead of it.

    Steps after the last save before a kill leave no trace in the folder, unless they were being saved.
    """
    return [
        (run.resumed_at + 1, run.done_before)
        for run in runs
        if run.resumed_at is not None and run.done_before is not None
    ]


def position_problem(source: str, runs: Sequence[Run], state: Any) -> str | None:
    """Compare the saved position of `source` with where its ledger ends; describe a difference."""
    batches = [each for run in runs if source in run.sources for each in run.sources[source].batches]
    if not batches or not isinstance(state, dict):
        return None
    epoch, _, end, length, _ = batches[-1]
    at = state.get("epoch"), state.get("position")
    if at == (epoch, end) or (at == (epoch + 1, 0) and end == (length if length is not None else end)):
        return None
    return (
        f"{source!r} is at epoch {documents.shown(at[0])}, batch {documents.shown(at[1])}, but its ledger ends at "
        f"epoch {epoch}, batch {end}"
    )


def _of_source(name: str, runs: Sequence[Run]) -> Iterator[Epoch]:
    known = [run for run in runs if name in run.sources]
    settings = known[0].sources[name].settings
    changed = sorted(
        {key for run in known for key, value in run.sources[name].settings.items() if value != settings.get(key)}
    )
    used: dict[int, list[tuple[Batches, int]]] = {}
    for run in known:
        for each in run.sources[name].batches:
            used.setdefault(each[0], []).append((each, run.ranks))
    for epoch, stretches in sorted(used.items()):
        batches = [each for each, _ in stretches]
        length = next((each[3] for each in batches if each[3] is not None), None)
        # What came before a resumed run without a ledger is not known; nor does the last epoch have to be at its end.
        start = batches[0][1] if epoch == min(used) and known[0].resumed_at is not None else 0
        end = length if epoch != max(used) and length is not None else 0
        problems = [*_gaps(batches, start, end), *_orders(batches, settings, epoch)]
        problems += [f"{key} differs between runs" for key in changed]
        count = max(each[2] for each in batches)
        ranks = tuple(ranks for _, ranks in stretches)
        yield Epoch(name, epoch, count - start, length, _samples(settings, start, count), ranks, tuple(problems))


def _gaps(batches: Sequence[Batches], start: int, end: int) -> Iterator[str]:
    """Describe which batches of an epoch are missing from `start` up to `end`, or there twice."""
    expected = start
    for _, begin, behind, _, _ in sorted(batches, key=lambda each: each[1:3]):
        if begin > expected:
            yield f"batches {expected} to {begin - 1} were not used"
        if begin < expected:
            yield f"batches {begin} to {min(behind, expected) - 1} were used twice"
        expected = max(expected, behind)
    if expected < end:
        yield f"batches {expected} to {end - 1} were not used"


def _orders(batches: Sequence[Batches], settings: Mapping[str, Any], epoch: int) -> Iterator[str]:
    """Describe how the order of an epoch contradicts its settings or changed, so that batches had other samples."""
    if len({each[3] for each in batches if each[3] is not None}) > 1:
        yield "its number of batches changed"
    digests = {each[4] for each in batches}
    if len(digests) > 1:
        yield "its order changed between runs"
        return
    size = _size(settings)
    if size is None or size > MOST_SAMPLES:
        return
    order = epoch_order(size, settings["seed"], epoch) if settings.get("shuffle") else torch.arange(size)
    if digests != {int(quick_digest(order))}:
        yield "its order is not the one that its seed decides"
    elif size and not bool((torch.bincount(order, minlength=size) == 1).all()):
        yield "its order does not have every sample once"


def _size(settings: Mapping[str, Any]) -> int | None:
    """Return the number of samples, if seed and epoch decide their order."""
    size, seed = settings.get("size"), settings.get("seed")
    is_known = settings.get("order") == "of the seed" and type(size) is int and type(seed) is int and size >= 0
    return size if is_known else None


def _samples(settings: Mapping[str, Any], start: int, end: int) -> int | None:
    size, batch_size = _size(settings), settings.get("batch_size")
    if size is None or type(batch_size) is not int:
        return None
    return min(end * batch_size, size) - min(start * batch_size, size)
