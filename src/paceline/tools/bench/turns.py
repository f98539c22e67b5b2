"""Fair comparisons on a noisy machine: variants take turns in one run, and ratios are of the times of one round.

A bare time says little where machines are shared; times that were measured side by side can be compared.
"""

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
    """Run variants in turns: each of them once in every round.

    Args:
        turns: for each variant, a function that does one turn and returns its measurement.
        rounds: how many rounds count.
        warm_up: how many more go before them.
        rotated: whether each round begins with the next variant, and not always with the first.

    Returns:
        For each variant, the measurement of each round.
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
    """Return this rank's seconds per call of `run`, all ranks starting together."""
    dist.barrier()
    start = time.perf_counter()
    for _ in range(calls):
        run()
    return (time.perf_counter() - start) / calls


def slowest_timed(run: Callable[[], Any], calls: int) -> float:
    """Return the slowest rank's seconds per call of `run`, all ranks starting together."""
    seconds = torch.tensor(timed(run, calls), dtype=torch.float64)
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    return float(seconds)


def median_ratio(numerator: Sequence[float], denominator: Sequence[float]) -> float:
    """Return the median over the rounds of one variant's time over another's."""
    return statistics.median(a / b for a, b in zip(numerator, denominator, strict=True))
