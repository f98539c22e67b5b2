"""The page of a profile: ``report.html``, one self-contained file.

    Report ──▶ sections of HTML (verdict, advice, bars, who waits, tables) ─┐
           ──▶ JSON for the drawings in the browser (timeline, charts) ─────┴▶ one document

uPlot, in ``uplot/``, draws the charts; decision 0027 gives the reasons.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from functools import cache
from statistics import median
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from paceline.core import output_files
from paceline.core.messages import counted, digits, nbytes
from paceline.core.spans import CHECKPOINT, COLLECTOR, OUTER_STEP, Span
from paceline.profiler import step_parts
from paceline.profiler.analyze import Report
from paceline.profiler.facts import ENOUGH, Facts, kind_name, ms, percent, sentence
from paceline.profiler.steps import Step, cut_into_stretches

SCRIPTS = ("common.js", "lanes.js", "drawing.js", "pointers.js", "timeline.js", "charts.js")
"""The order matters: each script uses declarations of earlier ones as it loads."""
FILES = "paceline.profiler"
MOST_POINTS = 60_000
"""Maximum number of points per figure over all ranks. More steps are binned, to limit the size of the page."""
SHOWN_FIRST = 8
"""Number of ranks that the timeline shows initially."""
MOST_DRAWN = 8
"""Maximum number of ranks drawn separately in the chart of steps (MOST_SINGLE in charts.js). If there are more, users
pick a rank."""
REST = (step_parts.DATA, step_parts.OPTIMIZER, step_parts.CHECKPOINT, step_parts.COLLECTOR, step_parts.OTHER)
"""Parts of a step without a tile of their own."""
METRICS = {
    "step": ("whole step", ()),
    "compute": ("computing (forward and backward)", step_parts.COMPUTE),
    "bubble": ("bubble", (step_parts.BUBBLE,)),
    "communication": ("exposed communication", (step_parts.COMMUNICATION,)),
}
OWN_CODE_LABEL = "own code"
"""Label of the boxes in the timeline for time outside of all spans."""
MIN_OWN_CODE_SHARE = 0.002
"""Own code shorter than this share of a step is not drawn."""
SHADES = 8
GUTTER = 44.0
"""Space for the rank numbers, at the left and at the top."""
SPELLED_OUT = 10
"""Maximum number of ranks for cells that are large enough to show their figures."""
MOST_LATE = 6
"""Maximum number of ranks in the table of the costliest ranks."""


def page(report: Report) -> str:
    """Return the HTML document of a run."""
    facts = report.facts
    links: list[tuple[str, str]] = []  # filled by the sections as they render
    sections = _render(
        "report.html",
        links=links,
        report=report,
        headline=_heading_and_rest(report.headline),
        facts=facts,
        title=facts.records[0].title,
        memory=facts.records[0].memory,
        steps=facts.accounts.steps,
        enough=ENOUGH,
        circumstances=_circumstances(facts),
        tiles=_tiles(facts),
        longest=max((sum(row.values()) for row in facts.rank_parts if row), default=0.0) or 1.0,
        timeline=timeline_chart(facts),
        waits=waiting_map(facts),
        chart=step_chart(facts),
        peaks=[record for record in facts.records if "peak" in record.memory],
    )
    # uPlot's license requires its notice in every copy.
    plot = f"/* uPlot, {_static('uplot', 'LICENSE').strip()} */\n{_static('uplot', 'uPlot.iife.min.js')}"
    return output_files.document(
        f"Profile of {facts.records[0].title}",
        _render("frame.html", links=links, sections=sections),
        _static("uplot", "uPlot.min.css") + _static("page.css"),
        [plot, *map(_static, SCRIPTS)],
    )


@cache
def _templates() -> Environment:
    environment = Environment(
        loader=PackageLoader(FILES), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    for filter_ in (kind_name, ms, nbytes, percent, sentence):
        environment.filters[filter_.__name__] = filter_
    environment.globals |= {
        "names": step_parts.NAMES,
        "meanings": step_parts.MEANINGS,
        "data_block": output_files.data_block,
    }
    return environment


def _render(template: str, **values: Any) -> Markup:
    return Markup(_templates().get_template(template).render(**values))


def _static(*path: str) -> str:
    return output_files.resource(FILES, "static", *path)


def _circumstances(facts: Facts) -> str:
    records, numbers = facts.records, facts.accounts.steps
    hosts, devices = {record.host for record in records}, Counter(record.device for record in records)
    ran_on = ", ".join(f"{number} × {name}" if number > 1 else name for name, number in devices.items())
    steps = counted(len(numbers), "step") + (f" ({numbers[0]}–{numbers[-1]})" if numbers else "")
    place = f"{counted(len(records), 'rank')} on {counted(len(hosts), 'host')} ({ran_on})"
    return f"{place} · backend {records[0].backend} · {steps}"


def _heading_and_rest(headline: str) -> tuple[str, str]:
    """Return what fits into a heading, and the rest of the verdict."""
    first, *rest = re.split(r"; |(?<=\.) ", headline, maxsplit=1)
    return sentence(first), sentence(rest[0]) if rest else ""


def _tiles(facts: Facts) -> list[tuple[str, str, str]]:
    """Return the eight tiles as (name, figure, note); unknown figures are dashes."""
    lengths = [length for row in facts.accounts.lengths for length in row if not math.isnan(length)]
    step = median(lengths) if lengths else None
    rate = facts.rows / step if facts.rows and step else None

    def shown(share: float) -> str:
        return percent(share) if facts.is_firm else "–"

    computing = sum(facts.shares[part] for part in step_parts.COMPUTE)
    other = sum(facts.shares[part] for part in REST)
    overlap = facts.mean_overlap
    return [
        ("step", "–" if step is None else ms(step), "median over ranks and steps"),
        ("samples per second", "–" if rate is None else digits(rate), "all ranks together"),
        ("computing", shown(computing), "forward and backward"),
        ("communication", shown(facts.shares[step_parts.COMMUNICATION]), "exposed: not hidden under backward"),
        ("bubble", shown(facts.shares[step_parts.BUBBLE]), "idle, waiting for slower ranks"),
        ("other", shown(other), "data, optimizer, saves, own code"),
        ("all-reduce", shown(facts.all_reduce_share()), "of compute plus all-reduce time"),
        ("overlap", "–" if overlap is None else shown(overlap), "of all-reduce time overlaps with computing"),
    ]


def timeline_chart(facts: Facts) -> dict[str, Any] | None:
    """Return the step :attr:`Facts.drawn` by rank, in milliseconds; None if there is none."""
    if facts.drawn is None:
        return None
    steps, buckets = facts.drawn
    zero = min(step.start for step in steps)  # one zero for all ranks, so that a late rank appears late
    spans = [[*(span for span in step.spans if span.end > span.start), *_own_code(step)] for step in steps]

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
        "notable": facts.accounts.notable_ranks(SHOWN_FIRST),
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
    has = {"saves": CHECKPOINT in labels, "pauses": COLLECTOR in labels, "outer": OUTER_STEP in labels}
    return {"step": steps[0].number, "has": has, "data": data}


def _own_code(step: Step) -> list[Span]:
    """Return the stretches of a step that are outside of all spans."""
    stretches, _ = cut_into_stretches(step.spans, step.start, step.end)
    return [
        Span(OWN_CODE_LABEL, start, end)
        for part, start, end in stretches
        if part == step_parts.OTHER and end - start >= MIN_OWN_CODE_SHARE * step.length
    ]


def step_chart(facts: Facts) -> dict[str, Any]:
    """Return the times of every step, in milliseconds with four digits."""
    accounts, ranks = facts.accounts, [record.rank for record in facts.records]
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
        "data": {"ranks": ranks, "steps": accounts.steps[::width], "metrics": metrics},
    }


def _present(values: Sequence[float]) -> list[float]:
    return [value for value in values if not math.isnan(value)]


def _binned(values: Sequence[float], width: int) -> list[float | None]:
    bins = (_present(values[start : start + width]) for start in range(0, len(values), width))
    return [_short(median(present)) if present else None for present in bins]


def _short(seconds: float) -> float:
    return float(f"{1e3 * seconds:.4g}")


def waiting_map(facts: Facts) -> dict[str, Any] | None:
    """Return the heat map of waiting, with a cell for each pair of ranks; None if no rank could wait for another."""
    rows = facts.accounts.waited_for
    if len(rows) < 2:
        return None
    cell = min(72.0, max(8.0, 520 / len(rows)))
    every = next(number for number in (1, 2, 4, 8, 16, 32, 64, 128, 10**9) if number * cell >= 22)  # legible numbers
    middles = [GUTTER + cell * (at + 0.5) for at in range(len(rows))]
    figures = []
    if len(rows) <= SPELLED_OUT:
        figures = [
            (middles[other], middles[at], ms(seconds).removesuffix(" ms") if seconds > 0 else "0")
            for at, row in enumerate(rows)
            for other, seconds in enumerate(row)
            if at != other
        ]
    return {
        "late": _late_ranks(rows),
        "size": GUTTER + cell * len(rows),
        "gutter": GUTTER,
        "cell": cell,
        "shades": _shades(rows, cell),
        "figures": figures,
        "numbers": [(middle, rank) for rank, middle in enumerate(middles)][::every],
        "data": [[float(f"{1e3 * value:.3g}") for value in row] for row in rows],
    }


def _late_ranks(rows: Sequence[Sequence[float]]) -> list[dict[str, Any]]:
    """Return the ranks that others wait for, costliest first, each with the rank that waits for it longest."""
    entries = []
    for rank in range(len(rows)):
        if caused := sum(row[rank] for row in rows) / (len(rows) - 1):
            waiting = max(range(len(rows)), key=lambda other: rows[other][rank])
            entries.append({"rank": rank, "caused": caused, "longest": rows[waiting][rank], "waiting": waiting})
    return sorted(entries, key=lambda entry: -entry["caused"])[:MOST_LATE]


def _shades(rows: Sequence[Sequence[float]], cell: float) -> list[tuple[int, str]]:
    """Return one SVG path per shade, because separate elements would be too many: 512 ranks have 262,144 cells."""
    longest, shades = max(map(max, rows)), dict[int, list[str]]()
    for at, row in enumerate(rows):
        for other, seconds in enumerate(row):
            if seconds and (shade := round(SHADES * seconds / longest)) > 0:
                x, y = GUTTER + cell * other, GUTTER + cell * at
                shades.setdefault(shade, []).append(f"M{x:g} {y:g}h{cell:g}v{cell:g}h-{cell:g}z")
    return [(shade, "".join(paths)) for shade, paths in sorted(shades.items())]
