"""Results of a comparison, computed from the records of its ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

from torch import Tensor

from paceline.tools.compare.modes import Way
from paceline.tools.compare.turn_taking import TURN


@dataclass(frozen=True)
class Row:
    """The results of one variant.

    The baseline is the mode ``single`` or, without it, the first variant. Its time per step is the median over its
    turns. The time of any other variant is the baseline's time multiplied by the median of their turn-by-turn ratios,
    because only times of the same turn are comparable.
    """

    mode: str
    devices: int
    ranks: int
    turns: tuple[float, ...]
    """Seconds per step of the slowest rank, in each turn."""
    seconds_per_step: float
    samples_per_step: float | None
    """Mean number over the timed steps, of all devices together; None if the model's inputs contain no tensor."""
    samples_per_second: float | None
    """:attr:`samples_per_step` divided by :attr:`seconds_per_step`."""
    speedup: float
    """:attr:`samples_per_second` relative to the baseline."""
    efficiency: float
    """:attr:`speedup` divided by the ratio of the numbers of devices."""
    memory_bytes: int
    """Peak memory of the rank with the highest peak."""
    replicas_identical: bool
    """Whether the final weights of all ranks are bit-identical."""
    weights_difference: float | None
    """Largest deviation from the baseline's weights, relative to its largest weight; None if the models differ."""


def figures(
    ways: Sequence[Way], records: Sequence[Mapping[str, Any]], weights: Sequence[Mapping[str, Tensor]]
) -> list[Row]:
    """Return a row for each variant, given its record and weights."""
    start = next((number for number, way in enumerate(ways) if way.mode == "single"), 0)
    base = _row(ways[start], records[start], None, 0.0)
    return [
        base if way == ways[start] else _row(way, record, base, weights_difference(weights[start], own_weights))
        for way, record, own_weights in zip(ways, records, weights, strict=True)
    ]


def _row(way: Way, record: Mapping[str, Any], base: Row | None, difference: float | None) -> Row:
    ranks = record["ranks"]
    steps = [max(step) for step in zip(*(rank["seconds"] for rank in ranks), strict=True)]
    turns = [fmean(steps[start : start + TURN]) for start in range(0, len(steps), TURN)]
    if base is None:
        seconds = median(turns)
    else:
        # A median, because an evaluation or a checkpoint may fall between two steps.
        seconds = base.seconds_per_step * median(time / base_ for time, base_ in zip(turns, base.turns, strict=True))
    samples = sum(rank["samples"] for rank in ranks) / len(steps) or None
    speedup = 1.0 if base is None else base.seconds_per_step / seconds
    if samples and base and base.samples_per_step:  # otherwise, assume that steps have equally many samples
        speedup *= samples / base.samples_per_step
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
        memory_bytes=max(rank["memory"] for rank in ranks),
        replicas_identical=len({rank["sha256"] for rank in ranks}) == 1,
        weights_difference=difference,
    )


def weights_difference(reference: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> float | None:
    """Return the largest difference relative to the largest weight in `reference`; None if the models differ."""
    if {name: tensor.shape for name, tensor in reference.items()} != {name: w.shape for name, w in weights.items()}:
        return None
    names = [name for name, tensor in weights.items() if tensor.numel()]
    differences = [float((weights[name].double() - reference[name].double()).abs().max()) for name in names]
    largest = max((float(reference[name].double().abs().max()) for name in names), default=0.0)
    return max(differences, default=0.0) / (largest or 1.0)
