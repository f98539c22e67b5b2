"""Data and controls of the charts that the browser draws: the timeline, every step, the gradient noise scale."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from statistics import median
from typing import Any

from paceline.core.output.html import data_block
from paceline.core.telemetry.spans import CHECKPOINT
from paceline.profiler.page.elements import Section, folded, select, table
from paceline.profiler.report import step_parts
from paceline.profiler.report.formatting import ms, notable_ranks
from paceline.profiler.report.report import Report, Timeline

DEVIATIONS, LEAST_RATIO, ALWAYS = 6.0, 1.1, 2.0
"""Scaled median absolute deviations, and the ratio, by which an outlier is above the rank's median. The ratio is for
runs without noise, where every step would be one. Twice the median is an outlier in any noise."""
MOST_OUTLIERS = 400
"""Most outliers that are marked, so that the page stays small on a run where every second step is one."""
MOST_POINTS = 60_000
"""Most points of one figure, over all ranks; more steps are binned, so that the file stays small."""
NOTABLE = 8
"""Ranks that the timeline shows first, when there are more."""
MOST_DRAWN = 8
"""Most ranks that the chart of steps tells apart by colour (MOST_SINGLE of charts.js); with more, one is chosen."""
METRICS = {
    "step": ("whole step", ()),
    "compute": ("computing (forward and backward)", step_parts.COMPUTE),
    "bubble": ("bubble", (step_parts.BUBBLE,)),
    "communication": ("exposed communication", (step_parts.COMMUNICATION,)),
}
Rows = Sequence[Sequence[float | None]]


@dataclass(frozen=True)
class Outlier:
    """A step that took much longer than others, on the rank where it took longest."""

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
        # The factor makes it the standard deviation where the noise is normal; outliers do not change a median.
        spread = 1.4826 * median(abs(value - typical) for value in there)
        limit = min(max(typical + DEVIATIONS * spread, LEAST_RATIO * typical), ALWAYS * typical)
        for index, value in enumerate(values):
            if value is not None and typical < value >= limit and (index not in found or value > found[index].seconds):
                found[index] = Outlier(index, rank, value, value / typical if typical else 1.0)
    longest = sorted(found.values(), key=lambda one: -one.seconds)[:MOST_OUTLIERS]
    return sorted(longest, key=lambda one: one.index)


def timeline(report: Report) -> Section:
    """Return a typical step, rank by rank."""
    step = report.timeline
    if step is None or not any(step.spans):
        return Section("timeline", "A typical step", "Timeline", "<p>No step was recorded in detail.</p>")
    ranks, few = len(report.ranks), notable_ranks(report, NOTABLE)
    choice = ""
    if ranks > NOTABLE:
        options = [("notable", f"the {len(few)} that say most"), ("all", f"all {ranks}")]
        choice = select("ranks", "Ranks", options)
    buttons = "".join(
        f'<button type="button" data-do="{key}" aria-label="{label}" title="{label}">{sign}</button>'
        for key, sign, label in (
            ("+", "+", "zoom in"),
            ("-", "−", "zoom out"),
            ("ArrowLeft", "←", "earlier"),
            ("ArrowRight", "→", "later"),
            ("Home", "whole step", "show the whole step"),
        )
    )
    saves = any(one.label == CHECKPOINT for row in step.spans for one in row)
    checkpoint = '<li><i class="p-checkpoint"></i>checkpoint</li>' if saves else ""
    body = f"""<p class="reading">Step {step.step}, of median length. For each rank, above: its phases; below: its
buckets of gradients, from launch to finish. A box holds what lies inside it: that of backward has the copies, launches
and waits below it, which the bars count as communication and bubble.</p>
<ul class="legend"><li><i class="p-data"></i>data wait</li><li><i class="p-forward"></i>forward</li>
<li><i class="p-backward"></i>backward</li><li><i class="p-optimizer"></i>optimizer</li>{checkpoint}
<li><i class="p-bubble"></i>waiting for the last rank to launch a bucket</li>
<li><i class="p-communication"></i>communication: a launch, a wait, a collective; below, a bucket travels</li>
<li><i class="p-communication pale"></i>faded: hidden under backward</li></ul>
<div class="controls">{buttons}{choice}<span class="range" aria-live="polite"></span></div>
<div class="scroller"><canvas class="axis" aria-hidden="true"></canvas><canvas class="lanes own-tip" tabindex="0"
role="application" aria-roledescription="timeline" aria-label="{escape(_label(report))}"></canvas></div>
<p class="spoken" aria-live="polite"></p>
<p class="reading keys">Drag to zoom into a stretch, Shift and drag (or one finger) to move, Ctrl and wheel (or two
fingers) to zoom, double-click for the whole step. Keys: + and − zoom, ← and → move, 0 shows all, n and p go from span
to span.</p>{data_block("timeline-data", timeline_data(step, report, few))}"""
    return Section("timeline", "A typical step", "Timeline", body)


def _label(report: Report) -> str:
    return f"Timeline of a step on {len(report.ranks)} ranks; n and p read out its spans, plus and minus zoom"


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


def steps(report: Report) -> Section | None:
    """Return the chart of every step, and the list of those that took longest."""
    if not report.steps or not report.ranks:
        return None
    outliers = find_outliers(report.step_seconds)
    many = len(report.ranks) > MOST_DRAWN
    width = bin_width(report)
    controls = select("metric", "Show", [(name, shown) for name, (shown, _) in METRICS.items()])
    if many:
        named = [("-1", "none")] + [(str(at), f"rank {one.rank}") for at, one in enumerate(report.ranks)]
        controls += select("rank", "Pick out", named)
    reading = "The range of all ranks, and their median." if many else "A point is a step of a rank."
    if width > 1:
        reading += f" A point stands for the median of {width} steps; outliers are single ones."
    label = f"Time of {len(report.steps)} steps on {len(report.ranks)} ranks; the table of outliers names the longest"
    body = (
        f'<p class="reading">{reading} Drag to zoom, double-click for all.</p><div class="controls">{controls}</div>'
        f'<div class="plot" data-label="{escape(label)}"></div>{_slowest(report, outliers)}'
        f"{data_block('steps-data', step_data(report, outliers, width))}"
    )
    return Section("steps", "Every step", "Steps", body)


def _slowest(report: Report, outliers: Sequence[Outlier]) -> str:
    if not outliers:
        return "<p>No step is an outlier.</p>"
    rows = [
        [str(report.steps[one.index]), f"{report.ranks[one.rank].rank}", ms(one.seconds), f"{one.ratio:.2f} ×"]
        for one in sorted(outliers, key=lambda one: -one.seconds)[:10]
    ]
    heads = ["step", "longest on rank", "time", "of the rank's median"]
    return folded(f"Outliers: {len(outliers)} of {len(report.steps)} steps", table(heads, rows, "Outliers"))


def bin_width(report: Report) -> int:
    """Return the number of steps in one point, with which the page has at most ``MOST_POINTS`` of each figure."""
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


def noise_scale(report: Report) -> Section | None:
    """Return the curve of the gradient noise scale, where it was measured."""
    scale = report.noise_scale
    if scale is None:
        return None
    body = f"<p>{escape(scale.text)}</p>"
    if scale.value is not None:
        data = {"value": scale.value, "batch_size": scale.batch_size, "curve": scale.curve}
        body += (
            '<p class="reading">Progress of one step, of the best possible, by the global batch size (McCandlish et '
            "al. 2018). Dashed: the critical batch size. Solid: this run.</p>"
            '<div class="plot" data-label="Progress per step by global batch size, on a logarithmic scale"></div>'
            f"{data_block('noise-data', data)}"
        )
    return Section("noise", "Gradient noise scale", "Noise scale", body)
