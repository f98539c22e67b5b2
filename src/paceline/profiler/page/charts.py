"""Data of the charts that the browser draws: the timeline, and every step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from paceline.core.telemetry.spans import CHECKPOINT
from paceline.profiler.report import step_parts
from paceline.profiler.report.formatting import notable_ranks
from paceline.profiler.report.report import Report, Timeline

DEVIATIONS, LEAST_RATIO, ALWAYS = 6.0, 1.1, 2.0
"""An outlier is this many scaled median absolute deviations, and this ratio, above the rank's median. The ratio is for
runs without noise. Twice the median is an outlier in any noise."""
MOST_OUTLIERS = 400
"""Most outliers to mark, which limits the size of the page."""
MOST_POINTS = 60_000
"""Most points of one figure over all ranks. More steps are binned, which limits the size of the page."""
NOTABLE = 8
"""Number of ranks that the timeline shows first."""
MOST_DRAWN = 8
"""Most ranks with a color each in the chart of steps (MOST_SINGLE in charts.js). With more, users choose one."""
METRICS = {
    "step": ("whole step", ()),
    "compute": ("computing (forward and backward)", step_parts.COMPUTE),
    "bubble": ("bubble", (step_parts.BUBBLE,)),
    "communication": ("exposed communication", (step_parts.COMMUNICATION,)),
}
Rows = Sequence[Sequence[float | None]]


@dataclass(frozen=True)
class Outlier:
    """A step that took much longer than others, on its slowest rank."""

    index: int
    """Index of the step among those of the report."""
    rank: int
    seconds: float
    ratio: float
    """Its length divided by the rank's median."""


def find_outliers(step_seconds: Sequence[Sequence[float | None]]) -> list[Outlier]:
    """Return the outliers in the order of the steps; `step_seconds` has the shape (steps, ranks)."""
    found: dict[int, Outlier] = {}
    for rank in range(len(step_seconds[0]) if step_seconds else 0):
        values = [row[rank] for row in step_seconds]
        there = [value for value in values if value is not None]
        if not there:
            continue
        typical = median(there)
        # The standard deviation if noise is normal.
        spread = 1.4826 * median(abs(value - typical) for value in there)
        limit = min(max(typical + DEVIATIONS * spread, LEAST_RATIO * typical), ALWAYS * typical)
        for index, value in enumerate(values):
            if value is not None and typical < value >= limit and (index not in found or value > found[index].seconds):
                found[index] = Outlier(index, rank, value, value / typical if typical else 1.0)
    longest = sorted(found.values(), key=lambda one: -one.seconds)[:MOST_OUTLIERS]
    return sorted(longest, key=lambda one: one.index)


def timeline_chart(report: Report) -> dict[str, Any] | None:
    """Return a typical step, rank by rank; None if none was recorded in detail."""
    step = report.timeline
    if step is None or not any(step.spans):
        return None
    saves = any(one.label == CHECKPOINT for row in step.spans for one in row)
    return {"has_saves": saves, "data": timeline_data(step, report, notable_ranks(report, NOTABLE))}


def timeline_data(step: Timeline, report: Report, notable: Sequence[int]) -> dict[str, Any]:
    """Return the timeline in milliseconds, rounded to microseconds."""

    def short(seconds: float | None) -> float | None:
        return None if seconds is None else round(1e3 * seconds, 3)

    spans = [[[one.label, short(one.start), short(one.end), one.bucket] for one in row] for row in step.spans]
    ends = [one.end for row in step.spans for one in row]
    ends += [one for bucket in step.buckets for one in bucket.finished if one is not None]
    return {
        "end": short(max(ends)),
        "ranks": [one.rank for one in report.ranks],
        "notable": list(notable),
        "stragglers": [one.rank for one in report.stragglers],
        "slices": spans,
        "buckets": [
            {
                "bucket": one.bucket,
                "nbytes": one.nbytes,
                "launched": [short(at) for at in one.launched],
                "finished": [short(at) for at in one.finished],
            }
            for one in step.buckets
        ],
    }


def step_chart(report: Report) -> dict[str, Any]:
    """Return the chart of every step, and the outliers that took longest."""
    outliers, width = find_outliers(report.step_seconds), bin_width(report)
    return {
        "width": width,
        "most_drawn": MOST_DRAWN,
        "metrics": [(name, shown) for name, (shown, _) in METRICS.items()],
        "choices": [("-1", "none")] + [(str(at), f"rank {one.rank}") for at, one in enumerate(report.ranks)],
        "slowest": sorted(outliers, key=lambda one: -one.seconds)[:10],
        "data": step_data(report, outliers, width),
    }


def bin_width(report: Report) -> int:
    """Return the number of steps per point that keeps each figure within ``MOST_POINTS``."""
    return max(1, -(-len(report.steps) * len(report.ranks) // MOST_POINTS))


def step_data(report: Report, outliers: Sequence[Outlier], width: int) -> dict[str, Any]:
    """Return each metric of each rank over the steps, in milliseconds with four digits."""
    metrics = {}
    for name, (_, parts) in METRICS.items():
        rows = _sums(report, parts) if parts else report.step_seconds
        metrics[name] = [_binned([row[at] for row in rows], width) for at in range(len(report.ranks))]
    return {
        "ranks": [one.rank for one in report.ranks],
        "steps": list(report.steps[::width]),
        "metrics": metrics,
        "outliers": [[report.steps[one.index], report.ranks[one.rank].rank, _short(one.seconds)] for one in outliers],
    }


def _sums(report: Report, parts: Sequence[str]) -> Rows:
    there = [report.parts[part] for part in parts if part in report.parts]
    if not there:
        return [[None] * len(report.ranks)] * len(report.steps)
    return [
        [None if None in ones else sum(one for one in ones if one is not None) for ones in zip(*rows, strict=True)]
        for rows in zip(*there, strict=True)
    ]


def _binned(values: Sequence[float | None], width: int) -> list[float | None]:
    bins = (values[start : start + width] for start in range(0, len(values), width))
    there = ([value for value in one if value is not None] for one in bins)
    return [_short(median(one)) if one else None for one in there]


def _short(seconds: float) -> float:
    return float(f"{1e3 * seconds:.4g}")
