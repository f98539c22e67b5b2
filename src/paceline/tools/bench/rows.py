"""The measurements: a row for each size and variant, its bandwidths, and the fitted model's time beside it.

The bandwidths are those of nccl-tests (its doc/PERFORMANCE.md). Algorithm bandwidth is bytes of the whole tensor by
time. Bus bandwidth multiplies it with the share of bytes that the collective must move at least: 2 (p−1)/p for an
all-reduce, (p−1)/p for reduce-scatter and all-gather, 1 for broadcast and reduce. So it compares with the speed of the
links for any number of ranks.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from paceline.comm.algorithms import build
from paceline.comm.algorithms.cost import Model, Sample, fit

LEAST_FITTED = 2
"""Fewest sizes that a model is fitted from: with one, latency and bandwidth cannot be told apart."""


@dataclass(frozen=True)
class Row:
    """One way to do a collective, on one size."""

    op: str
    variant: str
    schedule: str | None
    """The schedule's name, for an algorithm of ours."""
    ranks: int
    nbytes: int
    """Bytes of the whole tensor."""
    times: tuple[float, ...]
    """Seconds per call of the slowest rank, in each round."""
    wrong: int
    """Number of elements with a wrong value, on all ranks."""
    model_seconds: float | None = None
    """Time by the fitted model."""

    @property
    def seconds(self) -> float:
        """The time: the median of :attr:`times`."""
        return statistics.median(self.times)

    @property
    def quartiles(self) -> tuple[float, float]:
        """The lower and the upper quartile of :attr:`times`, between which half of them lie."""
        if len(self.times) == 1:
            return self.times[0], self.times[0]
        # Inclusive, because the other method finds quartiles of few rounds beyond all times that were measured.
        lower, _, upper = statistics.quantiles(self.times, n=4, method="inclusive")
        return lower, upper

    @property
    def spread(self) -> float:
        """Half the distance between the quartiles, as a share of :attr:`seconds`."""
        lower, upper = self.quartiles
        return (upper - lower) / 2 / self.seconds

    @property
    def algbw(self) -> float:
        """Algorithm bandwidth in GB/s."""
        return self.nbytes / self.seconds / 1e9

    @property
    def busbw(self) -> float:
        """Bus bandwidth in GB/s."""
        return self.algbw * bus_factor(self.op, self.ranks)


def bus_factor(op: str, ranks: int) -> float:
    """Return bus bandwidth over algorithm bandwidth."""
    if op == "all_reduce":
        return 2 * (ranks - 1) / ranks
    return (ranks - 1) / ranks if op in ("reduce_scatter", "all_gather") else 1.0


def fitted(rows: Sequence[Row], cores: int) -> tuple[Model | None, list[Row]]:
    """Fit the model to the rows of our algorithms; returns it, and the rows with its times. None if they are too few.

    Args:
        rows: the measurements.
        cores: the cores that the ranks share.
    """
    schedules = {row: build(row.schedule, row.ranks) for row in rows if row.schedule is not None}
    samples = [Sample(schedule, row.nbytes, row.seconds) for row, schedule in schedules.items()]
    if len({sample.nbytes for sample in samples if sample.schedule.steps}) < LEAST_FITTED:
        return None, list(rows)
    model = fit(samples, cores)
    return model, [
        replace(row, model_seconds=model.seconds(schedules[row], row.nbytes)) if row in schedules else row
        for row in rows
    ]
