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

    The base is the mode ``single``, or the first one where that does not run. Its time per batch is the median of its
    turns. Another mode's is the base's, multiplied by the median of their ratios turn by turn, because only times of
    one turn were measured side by side. All other figures follow from these times by what their docstrings say, so
    whoever divides two figures of a table gets the third.
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
    """A batch is the loader's global batch, and a whole step where a program has several wrapped models."""
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
    """:attr:`seconds_per_batch` times the mean number of batches in a step."""
    all_reduce_share: float | None
    """Time of all-reducing a step's gradients while nothing else runs, by the time of a step, median of the turns; None
    with one process."""
    all_reduce_seconds: float | None
    """:attr:`all_reduce_share` of :attr:`seconds_per_step`."""
    exposed_seconds: float | None
    """Time that a step waits for communication on the rank that waits least in it, computed in the same way; None where
    the wrapper does not count it. Beside the work of other ranks an all-reduce takes longer than alone, so it can be
    more than :attr:`all_reduce_seconds`."""
    bubble_seconds: float | None
    """Time beyond that which ranks wait in a step, for the last one; mean of all ranks."""
    sm_occupancy: float | None
    """Active warps by those that a GPU can hold, mean of the ranks; None where NVML does not tell."""
    memory_bytes: int
    """Peak memory of the rank that needs most."""
    replicas_identical: bool
    """Whether all ranks ended with the same bits."""
    weights: str
    """Comparison of the weights with those of the first mode, in words."""
    wrappers: int
    """Number of models that the program wraps."""


def figures(name: str, record: Mapping[str, Any], nproc: int, base: Row | None, weights: str) -> Row:
    """Return the row of the mode called `name`, whose ranks wrote `record`.

    Args:
        name: one of the modes.
        record: the record of :class:`~paceline.tools.compare.measured_run.Meter`.
        nproc: number of devices of the comparison.
        base: the row of the mode to which times are relative; None for that mode itself.
        weights: see :attr:`Row.weights`.
    """
    ranks, mode, devices = record["ranks"], MODES[name], devices_of(name, nproc)
    steps, batches = _of_slowest(ranks, "seconds"), _of_slowest(ranks, "batches")
    turns = mean_of_turns(time / count for time, count in zip(steps, batches, strict=True))
    # Medians, because an evaluation or a checkpoint may lie between two steps.
    per_batch = median(turns) if base is None else base.seconds_per_batch * _median_ratio(turns, base.turns)
    rows = sum(sum(rank["rows"]) for rank in ranks) / sum(batches) or None
    # Where rows are not known, the batches of all modes are taken for equal.
    more = rows / base.rows_per_batch if rows and base and base.rows_per_batch else 1.0
    gain = 1.0 if base is None else more * base.seconds_per_batch / per_batch
    is_known = name == "single" or (base is not None and base.mode == "single")
    per_step = per_batch * fmean(batches)
    in_turns = mean_of_turns(steps)
    share = _median_ratio(record["all_reduce_seconds"], in_turns) if len(ranks) > 1 else None
    waits: list[float | None] = [None, None]
    if mode.wrapper == "paceline" and len(ranks) > 1:
        waits = [per_step * _median_ratio(waiting, in_turns) for waiting in _waiting(ranks)]
    return Row(
        name,
        devices,
        len(ranks),
        seconds=sum(steps),
        turns=tuple(turns),
        seconds_per_batch=per_batch,
        rows_per_batch=rows,
        samples_per_second=rows / per_batch if rows else None,
        speedup=gain if is_known else None,
        efficiency=gain / devices if is_known else None,
        largest_batch=sum(rank["largest"] for rank in ranks) or None,
        seconds_per_step=per_step,
        all_reduce_share=share,
        all_reduce_seconds=None if share is None else share * per_step,
        exposed_seconds=waits[0],
        bubble_seconds=waits[1],
        sm_occupancy=_mean([rank["sm_occupancy"] for rank in ranks]),
        memory_bytes=max(rank["memory"] for rank in ranks),
        replicas_identical=len({rank["sha256"] for rank in ranks}) == 1,
        weights=weights,
        wrappers=record["wrappers"],
    )


def mean_of_turns(values: Iterable[float]) -> list[float]:
    """Return the mean of each turn's steps, given a value for every step."""
    listed = list(values)
    return [fmean(listed[start : start + TURN]) for start in range(0, len(listed), TURN)]


def _median_ratio(dividends: Sequence[float], divisors: Sequence[float]) -> float:
    return median(one / other for one, other in zip(dividends, divisors, strict=True))


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


def _of_slowest(ranks: Sequence[Mapping[str, Any]], key: str) -> list[Any]:
    """Return the largest of the ranks' values in each step."""
    return [max(values) for values in zip(*(rank[key] for rank in ranks), strict=True)]


def _waiting(ranks: Sequence[Mapping[str, Any]]) -> tuple[list[float], list[float]]:
    """Return for each turn the seconds that a step waits for communication, and for the last rank.

    The rank that comes last to the all-reduces of a step waits for nobody, so what it waits is communication.
    """
    waited = list(zip(*(rank["waited"] for rank in ranks), strict=True))
    return mean_of_turns(min(step) for step in waited), mean_of_turns(fmean(step) - min(step) for step in waited)


def compare_weights(reference: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> str:
    """Return how far `weights` are from those of the first mode: equal, or by which share of the largest they differ.

    Both hold the same sample of each parameter.
    """
    if reference.keys() != weights.keys():
        return "another model"
    difference, largest = weights_difference(reference, weights)
    if not difference:
        return "equal"
    return f"differ by {difference / largest:.0e}" if largest else f"differ by {difference:.0e}, absolutely"


def weights_difference(reference: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> tuple[float, float]:
    """Return the largest difference of a weight from that of the same model in `reference`, and the largest weight."""
    pairs = [(reference[name].double(), tensor.double()) for name, tensor in weights.items() if tensor.numel()]
    difference = max((float((other - one).abs().max()) for one, other in pairs), default=0.0)
    return difference, max((float(one.abs().max()) for one, _ in pairs), default=0.0)
