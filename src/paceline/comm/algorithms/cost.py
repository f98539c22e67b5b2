"""The alpha-beta-gamma model of an algorithm's cost, its fit to measurements, and the fastest algorithm.

A message costs alpha seconds, plus beta for each byte; reducing a byte costs gamma. Hockney, "The communication
challenge for MPP: Intel Paragon and Meiko CS-2", Parallel Computing 20 (1994); with gamma as in Thakur, Rabenseifner &
Gropp, IJHPCA 19 (2005). A rank sends and receives at the same time, one message each way. So a step takes

    alpha  +  beta · the most bytes that a rank sends or receives  +  gamma · the most bytes that a rank reduces

and an algorithm takes the sum of its steps. For p ranks, n bytes, L = ⌈log₂ p⌉ (tested equal to the schedules):

    linear broadcast, reduce           (p−1) α  +  (p−1) n β          [+ (p−1) n γ]
    tree broadcast, reduce             L α      +  L n β              [+ L n γ]
    scatter, all-gather (p = 2^L)      (L+p−1) α + 2 (p−1)/p n β
    ring reduce-scatter, all-gather    (p−1) α  +  (p−1)/p n β        [+ (p−1)/p n γ]
    ring all-reduce                    2(p−1) α +  2 (p−1)/p n β       + (p−1)/p n γ
    tree all-reduce                    2 L α    +  2 L n β             + L n γ
    halving-doubling (p = 2^L)         2 L α    +  2 (p−1)/p n β       + (p−1)/p n γ
    hierarchical, h hosts of m         2(m+h−2) α + 2 (p−1)/p n β      + (p−1)/p n γ

Ranks that share the `cores` of a host copy every byte twice on the CPU, once to send it and once to receive it. A step
takes at least as long as all its copies and sums, divided by the cores. So with 2 ranks on 2 cores the ring is as slow
as the tree, because the time depends on the total work of all ranks, not on its balance.

Measured over Gloo on 2 cores, from 64 KB to 25 MB (2026-11-20, kept in ``benchmarks/results``): the fitted model has a
median error of 10 % and a maximum of 28 % with 2 ranks (34 of 44 times within 20 %), and of 13 % and 38 % with 4 ranks
(35 of 44). Without `cores` the median errors are 19 % and 41 %. With 2 ranks, ring, halving-doubling and hierarchical
send identical messages, yet their times differ by up to 25 %.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import NamedTuple

import torch

from paceline.comm.algorithms.schedule import Result, Schedule, Step
from paceline.comm.algorithms.schedules import NAMES, build
from paceline.errors import UsageError

LARGEST = 2**40
"""Largest size, in bytes, that :func:`crossovers` considers."""


class Model(NamedTuple):
    """Costs of messages and sums."""

    alpha: float
    """Seconds for a message."""
    beta: float
    """Seconds for a byte that is sent."""
    gamma: float = 0.0
    """Seconds for a byte that is reduced."""
    cores: int | None = None
    """Number of cores that the ranks of a host share; None if ranks do not share cores."""

    def seconds(self, schedule: Schedule, nbytes: float) -> float:
        """Return the seconds that `schedule` takes for a tensor of `nbytes`."""
        messages, moved, reduced = features(schedule, nbytes, self.cores)
        return self.alpha * messages + self.beta * moved + self.gamma * reduced


Features = tuple[float, float, float]
"""Factors of alpha, beta and gamma."""


def features(schedule: Schedule, nbytes: float, cores: int | None = None) -> Features:
    """Count the consecutive messages, the bytes moved and the bytes reduced, for a tensor of `nbytes`."""
    counts = [_count(step, nbytes / schedule.chunks, cores) for step in schedule.steps]
    messages, moved, reduced = (sum(column) for column in zip(*counts, strict=True)) if counts else (0.0, 0.0, 0.0)
    return messages, moved, reduced


def _count(step: Step, per_chunk: float, cores: int | None) -> Features:
    """Count the factors of one step: the busiest rank's work, or all ranks' work divided by the cores."""
    if not step:
        return 0.0, 0.0, 0.0
    sent: dict[int, float] = {}
    received: dict[int, float] = {}
    reduced: dict[int, float] = {}
    for transfer in step:
        size = per_chunk * len(transfer.chunks)
        sent[transfer.src] = sent.get(transfer.src, 0.0) + size
        received[transfer.dst] = received.get(transfer.dst, 0.0) + size
        if transfer.reduce:
            reduced[transfer.dst] = reduced.get(transfer.dst, 0.0) + size
    port = max(*sent.values(), *received.values())
    adder = max(reduced.values(), default=0.0)
    if cores is None:
        return 1.0, port, adder
    copies = sum(sent.values()) + sum(received.values())
    # Both ends of a message occupy a core, for its setup and for its bytes.
    return max(1.0, 2 * len(step) / cores), max(port, copies / cores), max(adder, sum(reduced.values()) / cores)


class Sample(NamedTuple):
    """A measurement."""

    schedule: Schedule
    nbytes: int
    """Size of the tensor, in bytes."""
    seconds: float


def fit(samples: Sequence[Sample], cores: int | None = None) -> Model:
    """Fit a model to `samples` by least squares of the relative errors; costs are nonnegative.

    Errors are relative so that a sample of 64 KB counts as much as one of 25 MB.
    """
    if any(sample.seconds <= 0 for sample in samples):
        raise UsageError("a measured time is not positive; repeat the measurement")
    measured = [
        (features(sample.schedule, sample.nbytes, cores), sample.seconds) for sample in samples if sample.schedule.steps
    ]
    if not measured:
        raise UsageError("no measurement to fit; measure an algorithm with 2 ranks or more")
    rows = torch.tensor([[part / seconds for part in counts] for counts, seconds in measured], dtype=torch.float64)
    best, smallest_error = [0.0, 0.0, 0.0], float("inf")
    # The best model without negative costs is the least-squares solution for some subset of the three costs. There are
    # only seven, so all are tried, without SciPy.
    for kept_columns in (chosen for many in (1, 2, 3) for chosen in combinations(range(3), many)):
        part = rows[:, list(kept_columns)]
        # Normalize the columns, because seconds per message and per byte differ by many orders of magnitude.
        scale = part.norm(dim=0).clamp(min=torch.finfo(torch.float64).tiny)
        costs = torch.linalg.lstsq(part / scale, torch.ones(len(rows), 1, dtype=torch.float64)).solution[:, 0] / scale
        error = float((part @ costs - 1).norm())
        # Slightly below 1, so that the model with fewer costs wins a tie.
        if bool((costs >= 0).all()) and error < smallest_error * 0.999999:
            smallest_error, best = error, [0.0, 0.0, 0.0]
            for index, value in zip(kept_columns, costs.tolist(), strict=True):
                best[index] = value
    return Model(best[0], best[1], best[2], cores)


def crossovers(size: int, model: Model, result: Result = "all-reduce") -> list[tuple[int, str]]:
    """Return each fastest algorithm with its smallest size in bytes: ``[(0, "tree_all_reduce"), (81920, …)]``.

    Ties go to the first one in :data:`~paceline.comm.algorithms.NAMES`. Costs are linear in the bytes, so an algorithm
    that is fastest at both ends of a range is fastest throughout.
    """
    schedules = [schedule for name in NAMES if (schedule := build(name, size)).result == result]

    def best(nbytes: int) -> str:
        return min(schedules, key=lambda schedule: model.seconds(schedule, nbytes)).name

    changes = [(0, best(0))]

    def search(low: int, high: int) -> None:
        if best(low) == best(high):
            return
        if high - low == 1:
            changes.append((high, best(high)))
            return
        middle = (low + high) // 2
        search(low, middle)
        search(middle, high)

    search(0, LARGEST)
    return changes
