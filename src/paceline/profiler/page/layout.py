"""The HTML document: templates filled with the figures of a report, including the styles and scripts."""

from __future__ import annotations

import math
from collections import Counter
from functools import cache
from statistics import median
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from paceline.core.output import html
from paceline.core.output.wording import counted, digits, nbytes
from paceline.profiler.analysis.analyze import Report
from paceline.profiler.analysis.confidence import ENOUGH
from paceline.profiler.analysis.facts import Facts
from paceline.profiler.page.charts import step_chart, timeline_chart
from paceline.profiler.page.waits import picture
from paceline.profiler.report import step_parts
from paceline.profiler.report.formatting import kind_name, ms, percent, sentence

# The order matters: each script uses declarations of earlier ones as it loads.
SCRIPTS = ("common.js", "lanes.js", "drawing.js", "pointers.js", "timeline.js", "charts.js")
FILES = "paceline.profiler.page"


def page(report: Report) -> str:
    """Return the HTML document of a run."""
    facts = report.facts
    links: list[tuple[str, str]] = []  # filled by the sections as they render
    sections = _render(
        "report.html",
        links=links,
        report=report,
        facts=facts,
        title=facts.records[0].title,
        memory=facts.records[0].memory,
        steps=facts.accounts.steps,
        enough=ENOUGH,
        circumstances=_circumstances(facts),
        tiles=_tiles(facts),
        longest=max((sum(row.values()) for row in facts.rank_parts if row), default=0.0) or 1.0,
        timeline=timeline_chart(facts),
        waits=picture(facts),
        chart=step_chart(facts),
        peaks=[record for record in facts.records if "peak" in record.memory],
    )
    # uPlot's license requires its notice in every copy.
    plot = f"/* uPlot, {_static('uplot', 'LICENSE').strip()} */\n{_static('uplot', 'uPlot.iife.min.js')}"
    return html.document(
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
    environment.globals |= {"names": step_parts.NAMES, "meanings": step_parts.MEANINGS, "data_block": html.data_block}
    return environment


def _render(template: str, **values: Any) -> Markup:
    return Markup(_templates().get_template(template).render(**values))


def _static(*path: str) -> str:
    return html.resource(FILES, "static", *path)


def _circumstances(facts: Facts) -> str:
    records, numbers = facts.records, facts.accounts.steps
    hosts, devices = {record.host for record in records}, Counter(record.device for record in records)
    ran_on = ", ".join(f"{number} × {name}" if number > 1 else name for name, number in devices.items())
    steps = counted(len(numbers), "step") + (f" ({numbers[0]}–{numbers[-1]})" if numbers else "")
    place = f"{counted(len(records), 'rank')} on {counted(len(hosts), 'host')} ({ran_on})"
    return f"{place} · backend {records[0].backend} · {steps}"


def _tiles(facts: Facts) -> list[tuple[str, str | None, str]]:
    """Return the main figures, with names and notes. With too few steps, shares are not shown."""
    lengths = [length for row in facts.accounts.lengths for length in row if not math.isnan(length)]
    step = median(lengths) if lengths else None
    rate = facts.rows / step if facts.rows and step else None

    def shown(share: float) -> str:
        return percent(share) if facts.is_firm else "–"

    computing = sum(facts.shares[part] for part in step_parts.COMPUTE)
    overlap = facts.mean_overlap
    return [
        ("step", "–" if step is None else ms(step), "median over ranks and steps"),
        ("samples per second", None if rate is None else digits(rate), "all ranks together"),
        ("computing", shown(computing), "forward and backward"),
        ("communication", shown(facts.shares[step_parts.COMMUNICATION]), "exposed: not hidden under backward"),
        ("bubble", shown(facts.shares[step_parts.BUBBLE]), "idle, waiting for a later rank"),
        ("all-reduce", shown(facts.all_reduce_share()), "of the time in which it or computing runs"),
        ("overlap", None if overlap is None else shown(overlap), "of all-reduce time overlaps with computing"),
    ]
