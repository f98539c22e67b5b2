"""Figures of a comparison, computed from what the ranks recorded by pure functions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

from torch import Tensor

from paceline.tools.compare.modes import Way
from paceline.tools.compare.turn_taking import TURN


@dataclass(frozen=True)
class Row:
    """The figures of one way.

    The base is the mode ``single``, or the first way if that does not run. Its time per step is the median of its
    turns. Another way's is the base's, multiplied by the median of their ratios turn by turn, because only times of
    one turn were measured side by side.
    """

    mode: str
    devices: int
    ranks: int
    turns: tuple[float, ...]
    """Seconds per step in each turn, of the slowest rank."""
    seconds_per_step: float
    samples_per_step: float | None
    """Mean over the timed steps, all devices together; None if the model's inputs hold no tensor."""
    samples_per_second: float | None
    """:attr:`samples_per_step` by :attr:`seconds_per_step`."""
    speedup: float
    """:attr:`samples_per_second` by the base's."""
    efficiency: float
    """:attr:`speedup` by the number of devices for each of the base's."""
    all_reduce_share: float | None
    """Time of all-reducing a step's gradients while nothing else runs, by the time of a step; None for one process."""
    waiting_share: float | None
    """Time that ranks wait in a step for communication and for the last rank, their mean, by the time of a step; None
    if the wrapper does not count it."""
    memory_bytes: int
    """Peak memory of the rank that needs most."""
    replicas_identical: bool
    """Whether all ranks ended with the same bits."""
    weights_difference: float | None
    """Largest difference of a weight from the base's, by the base's largest weight; None for another model."""


def figures(
    ways: Sequence[Way], records: Sequence[Mapping[str, Any]], weights: Sequence[Mapping[str, Tensor]]
) -> list[Row]:
    """Return a row for each way, from the record and the weights that its ranks wrote."""
    start = next((number for number, way in enumerate(ways) if way.mode == "single"), 0)
    base = _row(ways[start], records[start], None, 0.0)
    return [
        base if way == ways[start] else _row(way, record, base, weights_difference(weights[start], own))
        for way, record, own in zip(ways, records, weights, strict=True)
    ]


def _row(way: Way, record: Mapping[str, Any], base: Row | None, difference: float | None) -> Row:
    ranks = record["ranks"]
    steps = [max(step) for step in zip(*(rank["seconds"] for rank in ranks), strict=True)]
    turns = mean_of_turns(steps)
    # Medians, because an evaluation or a checkpoint may lie between two steps.
    seconds = median(turns) if base is None else base.seconds_per_step * _median_ratio(turns, base.turns)
    samples = sum(rank["samples"] for rank in ranks) / len(steps) or None
    speedup = 1.0 if base is None else base.seconds_per_step / seconds
    if samples and base and base.samples_per_step:  # otherwise the steps are taken for equal
        speedup *= samples / base.samples_per_step
    waited = mean_of_turns(fmean(step) for step in zip(*(rank["waited"] for rank in ranks), strict=True))
    return Row(
        way.mode,
        way.devices,
        len(ranks),
        turns=tuple(turns),
        seconds_per_step=seconds,
        samples_per_step=samples,
        samples_per_second=samples / seconds if samples else None,
        speedup=speedup,
        efficiency=speedup * (base.devices if base else way.devices) / way.devices,
        all_reduce_share=_median_ratio(record["all_reduce_seconds"], turns) if len(ranks) > 1 else None,
        waiting_share=_median_ratio(waited, turns) if way.mode == "ddp" else None,
        memory_bytes=max(rank["memory"] for rank in ranks),
        replicas_identical=len({rank["sha256"] for rank in ranks}) == 1,
        weights_difference=difference,
    )


def mean_of_turns(values: Iterable[float]) -> list[float]:
    """Return the mean of each turn's steps, given a value for every step."""
    listed = list(values)
    return [fmean(listed[start : start + TURN]) for start in range(0, len(listed), TURN)]


def _median_ratio(dividends: Sequence[float], divisors: Sequence[float]) -> float:
    return median(dividend / divisor for dividend, divisor in zip(dividends, divisors, strict=True))


def weights_difference(reference: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> float | None:
    """Return the largest difference of a weight by the largest weight in `reference`; None for another model."""
    if {name: each.shape for name, each in reference.items()} != {name: each.shape for name, each in weights.items()}:
        return None
    pairs = [(reference[name].double(), tensor.double()) for name, tensor in weights.items() if tensor.numel()]
    difference = max((float((other - one).abs().max()) for one, other in pairs), default=0.0)
    return difference / (max((float(one.abs().max()) for one, _ in pairs), default=0.0) or 1.0)
