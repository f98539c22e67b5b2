"""Steps that stand out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

DEVIATIONS, LEAST_RATIO = 6.0, 1.1
"""An outlier is above the rank's median by this many scaled median absolute deviations, and by this ratio."""
MOST = 400
"""Outliers that are marked, the longest; a page stays small on a run where every second step is one."""


@dataclass(frozen=True)
class Outlier:
    """A step that took much longer than others, on the rank where it took longest."""

    index: int
    """Index of the step among those of the report."""
    rank: int
    seconds: float
    ratio: float
    """By the rank's median."""


def find_outliers(step_seconds: Sequence[Sequence[float | None]]) -> list[Outlier]:
    """Return the outliers in the order of the steps; `step_seconds` has the shape (steps, ranks)."""
    found: dict[int, Outlier] = {}
    for rank in range(len(step_seconds[0]) if step_seconds else 0):
        values = [row[rank] for row in step_seconds]
        there = [value for value in values if value is not None]
        if not there:
            continue
        typical = median(there)
        spread = 1.4826 * median(abs(value - typical) for value in there)
        limit = max(typical + DEVIATIONS * spread, LEAST_RATIO * typical)
        for index, value in enumerate(values):
            if value is not None and value > limit and (index not in found or value > found[index].seconds):
                found[index] = Outlier(index, rank, value, value / typical if typical else 1.0)
    longest = sorted(found.values(), key=lambda one: -one.seconds)[:MOST]
    return sorted(longest, key=lambda one: one.index)
