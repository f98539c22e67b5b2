"""Measurements: a row for each size and variant, with bandwidths.

Bandwidths are defined as in nccl-tests (doc/PERFORMANCE.md). Algorithm bandwidth is the size of the whole tensor
divided by the time. Bus bandwidth multiplies it by the minimum traffic of the collective relative to this size:
2 (p−1)/p for an all-reduce, (p−1)/p for reduce-scatter and all-gather, 1 for broadcast and reduce. It can be compared
with the speed of the links for any number of ranks.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """Times of a variant on one size."""

    op: str
    variant: str
    ranks: int
    nbytes: int
    """Bytes of the whole tensor."""
    times: tuple[float, ...]
    """Seconds per call on the slowest rank, in each round."""
    wrong: int
    """Number of wrong elements on all ranks."""

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
