"""Data for the charts that the browser draws: the timeline, and the times of every step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from paceline.core.telemetry.spans import CHECKPOINT, Span
from paceline.profiler.analysis.facts import Facts
from paceline.profiler.report import step_parts

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


@dataclass(frozen=True)
class Outlier:
    """A step that took much longer than usual, on its slowest rank."""

    index: int
    """Index of the step in the list of measured steps."""
    rank: int
    seconds: float
    ratio: float
    """Its length divided by the rank's median."""


def find_outliers(step_seconds: Sequence[Sequence[float]]) -> list[Outlier]:
    """Return the outliers in step order; `step_seconds` has shape (steps, ranks), with NaN for missing steps."""
    worst: dict[int, Outlier] = {}
    for rank, values in enumerate(zip(*step_seconds, strict=True)):
        present = _present(values)
        if not present:
            continue
        typical = median(present)
        # An estimate of the standard deviation, if the noise is normal.
        spread = 1.4826 * median(abs(value - typical) for value in present)
        limit = min(max(typical + DEVIATIONS * spread, LEAST_RATIO * typical), ALWAYS * typical)
        for index, value in enumerate(values):  # NaN is not larger than any number
            if typical < value >= limit and (index not in worst or value > worst[index].seconds):
                worst[index] = Outlier(index, rank, value, value / typical if typical else 1.0)
    longest = sorted(worst.values(), key=lambda outlier: -outlier.seconds)[:MOST_OUTLIERS]
    return sorted(longest, key=lambda outlier: outlier.index)


def timeline_chart(facts: Facts) -> dict[str, Any] | None:
    """Return the detailed step of median length, rank by rank, in milliseconds; None without detailed steps."""
    if facts.typical is None:
        return None
    steps, buckets = facts.detailed[facts.typical], facts.buckets[facts.typical]
    zero = min(step.start for step in steps)  # one zero for all ranks, so that a late rank appears late
    spans = [[span for span in step.spans if span.end > span.start] for step in steps]

    def short(seconds: float | None) -> float | None:
        return None if seconds is None else round(1e3 * seconds, 3)

    def slice_of(span: Span) -> list[Any]:
        return [span.label, short(span.start - zero), short(span.end - zero), span.bucket]

    labels = {span.label for row in spans for span in row}
    ends = [span.end - zero for row in spans for span in row]
    ends += [end for bucket in buckets for end in bucket.finished if end is not None]
    data = {
        "end": short(max(ends)),
        "ranks": [record.rank for record in facts.records],
        "notable": facts.accounts.notable_ranks(NOTABLE),
        "stragglers": [slow.rank for slow in facts.stragglers],
        "slices": [list(map(slice_of, row)) for row in spans],
        "buckets": [
            {
                "bucket": bucket.bucket,
                "nbytes": bucket.nbytes,
                "launched": list(map(short, bucket.launched)),
                "finished": list(map(short, bucket.finished)),
            }
            for bucket in buckets
        ],
    }
    return {"step": steps[0].number, "has_saves": CHECKPOINT in labels, "data": data}


def step_chart(facts: Facts) -> dict[str, Any]:
    """Return the times of every step, in milliseconds with four digits, and the longest outliers."""
    accounts, ranks = facts.accounts, [record.rank for record in facts.records]
    outliers = find_outliers(accounts.lengths)
    # Steps per point, chosen to keep each figure within the limit.
    width = max(1, -(-len(accounts.steps) * len(ranks) // MOST_POINTS))
    metrics = {}
    for name, (_, parts) in METRICS.items():
        rows = [accounts.parts[part] for part in parts] if parts else [accounts.lengths]
        sums = [[sum(values) for values in zip(*steps, strict=True)] for steps in zip(*rows, strict=True)]
        metrics[name] = [_binned([row[rank] for row in sums], width) for rank in range(len(ranks))]
    return {
        "width": width,
        "most_drawn": MOST_DRAWN,
        "metrics": [(name, shown) for name, (shown, _) in METRICS.items()],
        "choices": [("-1", "none")] + [(str(rank), f"rank {rank}") for rank in ranks],
        "slowest": sorted(outliers, key=lambda outlier: -outlier.seconds)[:10],
        "data": {
            "ranks": ranks,
            "steps": accounts.steps[::width],
            "metrics": metrics,
            "outliers": [
                [accounts.steps[outlier.index], outlier.rank, _short(outlier.seconds)] for outlier in outliers
            ],
        },
    }


def _present(values: Sequence[float]) -> list[float]:
    return [value for value in values if not math.isnan(value)]


def _binned(values: Sequence[float], width: int) -> list[float | None]:
    bins = (_present(values[start : start + width]) for start in range(0, len(values), width))
    return [_short(median(present)) if present else None for present in bins]


def _short(seconds: float) -> float:
    return float(f"{1e3 * seconds:.4g}")
