"""Fair comparisons on a noisy machine: variants take turns, and only times of the same round are compared."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

Measurement = TypeVar("Measurement")


def take_turns(
    turns: Mapping[str, Callable[[], Measurement]], rounds: int, *, warm_up: int = 1, rotated: bool = False
) -> dict[str, list[Measurement]]:
    """Run every variant once per round, and return the measurements by variant.

    Args:
        turns: a function for each variant that runs one turn and returns its measurement.
        rounds: number of measured rounds.
        warm_up: number of unmeasured rounds before the measured ones.
        rotated: start each round with the next variant instead of the first.
    """
    measurements: dict[str, list[Measurement]] = {name: [] for name in turns}
    names = list(turns)
    for round_ in range(rounds + warm_up):
        first = round_ % len(names) if rotated else 0
        for name in names[first:] + names[:first]:
            measurement = turns[name]()
            if round_ >= warm_up:
                measurements[name].append(measurement)
    return measurements


def timed(run: Callable[[], Any], calls: int) -> float:
    """Return the seconds per call of `run` on this rank. All ranks start together."""
    dist.barrier()
    start = time.perf_counter()
    for _ in range(calls):
        run()
    return (time.perf_counter() - start) / calls


def slowest_timed(run: Callable[[], Any], calls: int) -> float:
    """Return the seconds per call of `run` on the slowest rank. All ranks start together."""
    seconds = torch.tensor(timed(run, calls), dtype=torch.float64, device="cpu")
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    return float(seconds)


def median_ratio(numerator: Sequence[float], denominator: Sequence[float]) -> float:
    """Return the median ratio of two variants' times in the same round."""
    return statistics.median(a / b for a, b in zip(numerator, denominator, strict=True))
