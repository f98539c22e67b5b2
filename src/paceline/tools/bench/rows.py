"""Measurements: a row for each size and variant, with bandwidths and the time of the fitted model.

Bandwidths are defined as in nccl-tests (doc/PERFORMANCE.md). Algorithm bandwidth is the size of the whole tensor
divided by the time. Bus bandwidth multiplies it by the minimum traffic of the collective relative to this size:
2 (p−1)/p for an all-reduce, (p−1)/p for reduce-scatter and all-gather, 1 for broadcast and reduce. It can be compared
with the speed of the links for any number of ranks.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from paceline.comm.algorithms import build
from paceline.comm.algorithms.cost import Model, Sample, fit

LEAST_FITTED = 2
"""Minimum number of sizes for a fit; one size cannot separate latency from bandwidth."""


@dataclass(frozen=True)
class Row:
    """Times of a variant on one size."""

    op: str
    variant: str
    schedule: str | None
    """Name of the schedule; None unless this is one of Paceline's algorithms."""
    ranks: int
    nbytes: int
    """Bytes of the whole tensor."""
    times: tuple[float, ...]
    """Seconds per call on the slowest rank, in each round."""
    wrong: int
    """Number of wrong elements on all ranks."""
    model_seconds: float | None = None
    """Time according to the fitted model."""

    @property
    def seconds(self) -> float:
        """Median of :attr:`times`."""
        return statistics.median(self.times)

    @property
    def quartiles(self) -> tuple[float, float]:
        """Lower and upper quartile of :attr:`times`."""
        if len(self.times) == 1:
            return self.times[0], self.times[0]
        # With few rounds, the exclusive method extrapolates beyond the measured times.
        lower, _, upper = statistics.quantiles(self.times, n=4, method="inclusive")
        return lower, upper

    @property
    def spread(self) -> float:
        """Half the distance between the quartiles, relative to :attr:`seconds`."""
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
    """Return the ratio of bus bandwidth to algorithm bandwidth."""
    if op == "all_reduce":
        return 2 * (ranks - 1) / ranks
    return (ranks - 1) / ranks if op in ("reduce_scatter", "all_gather") else 1.0


def fitted(rows: Sequence[Row], cores: int) -> tuple[Model | None, list[Row]]:
    """Return a model fitted to Paceline's algorithms (None for too few sizes), and the rows with its times.

    Args:
        rows: measurements.
        cores: cores that the ranks share.
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
