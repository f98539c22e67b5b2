"""Data for the charts that the browser draws: the timeline, and the times of every step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from paceline.core.telemetry.spans import CHECKPOINT, Span
from paceline.profiler.report import step_parts
from paceline.profiler.report.formatting import notable_ranks
from paceline.profiler.report.report import Report

DEVIATIONS, LEAST_RATIO, ALWAYS = 6.0, 1.1, 2.0
"""A step is an outlier if it is at least `DEVIATIONS` scaled median absolute deviations above the rank's median and at
least `LEAST_RATIO` times the median (which matters in runs without noise), or if it is `ALWAYS` times the median."""
MOST_OUTLIERS = 400
"""Maximum number of marked outliers, to limit the size of the page."""
MOST_POINTS = 60_000
"""Maximum number of points per figure over all ranks. More steps are binned, to limit the size of the page."""
NOTABLE = 8
"""Number of ranks that the timeline shows initially."""
MOST_DRAWN = 8
"""Maximum number of ranks drawn separately in the chart of steps (MOST_SINGLE in charts.js). If there are more, users
pick a rank."""
METRICS = {
    "step": ("whole step", ()),
    "compute": ("computing (forward and backward)", step_parts.COMPUTE),
    "bubble": ("bubble", (step_parts.BUBBLE,)),
    "communication": ("exposed communication", (step_parts.COMMUNICATION,)),
}
Rows = Sequence[Sequence[float | None]]


@dataclass(frozen=True)
class Outlier:
    """A step that took much longer than usual, on its slowest rank."""

    index: int
    """Index of the step in the report's list of steps."""
    rank: int
    seconds: float
    ratio: float
    """Its length divided by the rank's median."""


def find_outliers(step_seconds: Sequence[Sequence[float | None]]) -> list[Outlier]:
    """Return the outliers in step order; `step_seconds` has shape (steps, ranks)."""
    worst: dict[int, Outlier] = {}
    for rank in range(len(step_seconds[0]) if step_seconds else 0):
        values = [row[rank] for row in step_seconds]
        present = [value for value in values if value is not None]
        if not present:
            continue
        typical = median(present)
        # An estimate of the standard deviation, if the noise is normal.
        spread = 1.4826 * median(abs(value - typical) for value in present)
        limit = min(max(typical + DEVIATIONS * spread, LEAST_RATIO * typical), ALWAYS * typical)
        for index, value in enumerate(values):
            if value is not None and typical < value >= limit and (index not in worst or value > worst[index].seconds):
                worst[index] = Outlier(index, rank, value, value / typical if typical else 1.0)
    longest = sorted(worst.values(), key=lambda outlier: -outlier.seconds)[:MOST_OUTLIERS]
    return sorted(longest, key=lambda outlier: outlier.index)


def timeline_chart(report: Report) -> dict[str, Any] | None:
    """Return a typical step, rank by rank, in milliseconds; None if no step was recorded in detail."""
    step = report.timeline
    if step is None or not any(step.spans):
        return None

    def short(seconds: float | None) -> float | None:
        return None if seconds is None else round(1e3 * seconds, 3)

    def slice_of(span: Span) -> list[Any]:
        return [span.label, short(span.start), short(span.end), span.bucket]

    spans = [span for row in step.spans for span in row]
    ends = [end for bucket in step.buckets for end in bucket.finished if end is not None]
    data = {
        "end": short(max([span.end for span in spans] + ends)),
        "ranks": [info.rank for info in report.ranks],
        "notable": notable_ranks(report, NOTABLE),
        "stragglers": [slow.rank for slow in report.stragglers],
        "slices": [[slice_of(span) for span in row] for row in step.spans],
        "buckets": [
            {
                "bucket": bucket.bucket,
                "nbytes": bucket.nbytes,
                "launched": [short(at) for at in bucket.launched],
                "finished": [short(at) for at in bucket.finished],
            }
            for bucket in step.buckets
        ],
    }
    return {"has_saves": any(span.label == CHECKPOINT for span in spans), "data": data}


def step_chart(report: Report) -> dict[str, Any]:
    """Return the times of every step, in milliseconds with four digits, and the longest outliers."""
    outliers = find_outliers(report.step_seconds)
    # Steps per point, chosen to keep each figure within the limit.
    width = max(1, -(-len(report.steps) * len(report.ranks) // MOST_POINTS))
    metrics = {}
    for name, (_, parts) in METRICS.items():
        rows = _sums(report, parts) if parts else report.step_seconds
        metrics[name] = [_binned([row[at] for row in rows], width) for at in range(len(report.ranks))]
    return {
        "width": width,
        "most_drawn": MOST_DRAWN,
        "metrics": [(name, shown) for name, (shown, _) in METRICS.items()],
        "choices": [("-1", "none")] + [(str(at), f"rank {info.rank}") for at, info in enumerate(report.ranks)],
        "slowest": sorted(outliers, key=lambda outlier: -outlier.seconds)[:10],
        "data": {
            "ranks": [info.rank for info in report.ranks],
            "steps": list(report.steps[::width]),
            "metrics": metrics,
            "outliers": [
                [report.steps[outlier.index], report.ranks[outlier.rank].rank, _short(outlier.seconds)]
                for outlier in outliers
            ],
        },
    }


def _sums(report: Report, parts: Sequence[str]) -> Rows:
    present = [report.parts[part] for part in parts if part in report.parts]
    if not present:
        return [[None] * len(report.ranks)] * len(report.steps)
    return [
        [None if None in ones else sum(sec for sec in ones if sec is not None) for ones in zip(*rows, strict=True)]
        for rows in zip(*present, strict=True)
    ]


def _binned(values: Sequence[float | None], width: int) -> list[float | None]:
    bins = (values[start : start + width] for start in range(0, len(values), width))
    present = ([value for value in group if value is not None] for group in bins)
    return [_short(median(group)) if group else None for group in present]


def _short(seconds: float) -> float:
    return float(f"{1e3 * seconds:.4g}")
