"""Figures of a comparison, computed from the modes' records by pure functions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

from torch import Tensor

from paceline.tools.compare.modes import MODES, devices_of
from paceline.tools.compare.turn_taking import TURN


@dataclass(frozen=True)
class Row:
    """The figures of one mode.

    Times are medians over the turns. The figures below each time are quotients of those beside them, so that whoever
    divides two figures of the table gets the third.
    """

    mode: str
    devices: int
    """Devices that it trains on."""
    ranks: int
    """Processes."""
    seconds: float
    """Time of all timed steps together."""
    turns: tuple[float, ...]
    """Seconds per batch in each turn."""
    seconds_per_batch: float
    """Median; a batch is the loader's global batch, and a whole step where a program has several wrapped models."""
    rows_per_batch: float | None
    """Samples of a batch, over all devices; the mean, because the last one of an epoch may be short. None where the
    model's inputs hold no tensor."""
    samples_per_second: float | None
    """:attr:`rows_per_batch` by :attr:`seconds_per_batch`."""
    speedup: float | None
    """:attr:`samples_per_second` by that of the mode ``single``; None where that did not run."""
    efficiency: float | None
    """:attr:`speedup` by :attr:`devices`."""
    largest_batch: int | None
    """Samples of the largest batch, over all devices: equal where modes do the same work."""
    seconds_per_step: float
    """Median."""
    all_reduce_seconds: float | None
    """Time of all-reducing a step's gradients while nothing else runs, median; None with one process."""
    all_reduce_share: float | None
    """:attr:`all_reduce_seconds` by :attr:`seconds_per_step`."""
    exposed_seconds: float | None
    """Time that a step waits for communication on the rank that waits least in it, median; None where the wrapper does
    not count it. Beside the work of other ranks an all-reduce takes longer than alone, so it can be more than
    :attr:`all_reduce_seconds`."""
    bubble_seconds: float | None
    """Time that a step waits beyond that on the other ranks, for the last one; mean of all ranks, median."""
    memory_bytes: int
    """Peak memory of the rank that needs most."""
    replicas_identical: bool
    """Whether all ranks ended with the same bits."""
    weights: str
    """Comparison of the weights with those of the first mode, in words."""
    wrappers: int
    """Number of models that the program wraps."""


def figures(name: str, record: Mapping[str, Any], nproc: int, single: Row | None, weights: str) -> Row:
    """Return the row of the mode called `name`, whose ranks wrote `record`.

    Args:
        name: one of the modes.
        record: the record of :class:`~paceline.tools.compare.measured_run.Meter`.
        nproc: number of devices of the comparison.
        single: the row of the mode ``single``, if that ran before.
        weights: see :attr:`Row.weights`.
    """
    ranks, mode, devices = record["ranks"], MODES[name], devices_of(name, nproc)
    steps = _of_slowest(ranks, "seconds")
    batches = _of_slowest(ranks, "batches")
    turns = mean_of_turns(time / count for time, count in zip(steps, batches, strict=True))
    # Medians, because an evaluation or a checkpoint may lie between two steps.
    per_batch, per_step = median(turns), median(mean_of_turns(steps))
    rows = sum(sum(rank["rows"]) for rank in ranks) / sum(batches) or None
    reduction = median(record["all_reduce_seconds"]) if len(ranks) > 1 else None
    exposed, bubble = _waiting(ranks) if mode.wrapper == "paceline" and len(ranks) > 1 else (None, None)
    gain = None
    if single is not None:
        # Where rows are not known, the batches of all modes are taken for equal.
        more = rows / single.rows_per_batch if rows and single.rows_per_batch else 1.0
        gain = more * single.seconds_per_batch / per_batch
    if name == "single":
        gain = 1.0
    return Row(
        name,
        devices,
        len(ranks),
        seconds=sum(steps),
        turns=tuple(turns),
        seconds_per_batch=per_batch,
        rows_per_batch=rows,
        samples_per_second=rows / per_batch if rows else None,
        speedup=gain,
        efficiency=None if gain is None else gain / devices,
        largest_batch=sum(rank["largest"] for rank in ranks) or None,
        seconds_per_step=per_step,
        all_reduce_seconds=reduction,
        all_reduce_share=None if reduction is None else reduction / per_step,
        exposed_seconds=exposed,
        bubble_seconds=bubble,
        memory_bytes=max(rank["memory"] for rank in ranks),
        replicas_identical=len({rank["sha256"] for rank in ranks}) == 1,
        weights=weights,
        wrappers=record["wrappers"],
    )


def mean_of_turns(values: Iterable[float]) -> list[float]:
    """Return the mean of each turn's steps, given a value for every step."""
    listed = list(values)
    return [fmean(listed[start : start + TURN]) for start in range(0, len(listed), TURN)]


def _of_slowest(ranks: Sequence[Mapping[str, Any]], key: str) -> list[Any]:
    """Return the largest of the ranks' values in each step."""
    return [max(values) for values in zip(*(rank[key] for rank in ranks), strict=True)]


def _waiting(ranks: Sequence[Mapping[str, Any]]) -> tuple[float, float]:
    """Return the seconds that a step waits for communication, and for the last rank.

    The rank that comes last to the all-reduces of a step waits for nobody, so what it waits is communication.
    """
    waited = list(zip(*(rank["waited"] for rank in ranks), strict=True))
    exposed = mean_of_turns(min(step) for step in waited)
    bubbles = mean_of_turns(fmean(step) - min(step) for step in waited)
    return median(exposed), median(bubbles)


def compare_weights(reference: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> str:
    """Return how far `weights` are from those of the first mode: equal, or by which share of the largest they differ.

    Both hold the same sample of each parameter.
    """
    if reference.keys() != weights.keys():
        return "another model"
    if all(reference[name].equal(tensor) for name, tensor in weights.items()):
        return "equal"
    largest = max(float(tensor.abs().max()) for tensor in reference.values() if tensor.numel())
    difference = max(
        float((tensor.double() - reference[name].double()).abs().max())
        for name, tensor in weights.items()
        if tensor.numel()
    )
    return f"differ by {difference / largest:.0e}" if largest else f"differ by {difference:.0e}, absolutely"
