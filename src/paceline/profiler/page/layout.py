"""The HTML document: templates filled with the figures of a report, including the styles and scripts."""

from __future__ import annotations

from collections import Counter
from functools import cache
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from paceline.core.output import html
from paceline.core.output.wording import counted, digits, nbytes
from paceline.profiler.page.charts import step_chart, timeline_chart
from paceline.profiler.page.waits import picture
from paceline.profiler.report import step_parts
from paceline.profiler.report.formatting import (
    kind_name,
    mean_parts,
    ms,
    percent,
    samples_per_second,
    sentence,
    share,
    typical_step,
)
from paceline.profiler.report.report import ENOUGH, Report

# The order matters: each script uses declarations of earlier ones as it loads.
SCRIPTS = ("common.js", "lanes.js", "drawing.js", "pointers.js", "timeline.js", "charts.js")
FILES = "paceline.profiler.page"


def page(report: Report) -> str:
    """Return the HTML document of a run."""
    links: list[tuple[str, str]] = []  # filled by the sections as they render
    sections = _render(
        "report.html",
        links=links,
        report=report,
        enough=ENOUGH,
        circumstances=_circumstances(report),
        tiles=_tiles(report),
        mean_parts=mean_parts(report),
        rows=report.rank_parts,
        longest=max((sum(row.values()) for row in report.rank_parts if row), default=0.0) or 1.0,
        timeline=timeline_chart(report),
        waits=picture(report),
        steps=step_chart(report),
        peaks=[record for record in report.ranks if record.peak_memory is not None],
    )
    # uPlot's license requires its notice in every copy.
    plot = f"/* uPlot, {_static('uplot', 'LICENSE').strip()} */\n{_static('uplot', 'uPlot.iife.min.js')}"
    return html.document(
        f"Profile of {report.title}",
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
    environment.globals |= {"names": step_parts.NAMES, "meanings": step_parts.MEANINGS, "data_block": _data_block}
    return environment


def _data_block(name: str, value: Any) -> Markup:
    return Markup(html.data_block(name, value))


def _render(template: str, **values: Any) -> Markup:
    return Markup(_templates().get_template(template).render(**values))


def _static(*path: str) -> str:
    return html.resource(FILES, "static", *path)


def _circumstances(report: Report) -> str:
    hosts, devices = {record.host for record in report.ranks}, Counter(record.device for record in report.ranks)
    ran_on = ", ".join(f"{number} × {name}" if number > 1 else name for name, number in devices.items())
    words = [counted(len(report.ranks), "rank"), f"on {counted(len(hosts), 'host')}", f"({ran_on})" if ran_on else ""]
    steps = counted(len(report.steps), "step")
    if report.steps:
        steps += f" ({report.steps[0]}–{report.steps[-1]})"
    return f"{' '.join(filter(None, words))} · backend {report.backend} · {steps}"


def _tiles(report: Report) -> list[tuple[str, str | None, str]]:
    """Return the main figures, with names and notes. With too few steps, shares are not shown."""
    step, rate, overlap = typical_step(report), samples_per_second(report), report.overlap

    def shown(value: float) -> str:
        return percent(value) if report.is_firm else "–"

    return [
        ("step", "–" if step is None else ms(step), "median over ranks and steps"),
        ("samples per second", None if rate is None else digits(rate), "all ranks together"),
        ("computing", shown(share(report, *step_parts.COMPUTE)), "forward and backward"),
        ("communication", shown(share(report, step_parts.COMMUNICATION)), "exposed: not hidden under backward"),
        ("bubble", shown(share(report, step_parts.BUBBLE)), "idle, waiting for a later rank"),
        ("all-reduce", shown(share(report, "allreduce")), "of the time in which it or computing runs"),
        ("overlap", None if overlap is None else shown(overlap), "of all-reduce time overlaps with computing"),
    ]
