"""The documents: the sections of a page, with the styles and scripts that it needs."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.core.output.html import document, resource
from paceline.profiler.page import charts, overview, tables, waits
from paceline.profiler.page.elements import Section, folded
from paceline.profiler.page.rank_bars import legend, longest_step, rank_bars
from paceline.profiler.page.two_runs import pair_sections
from paceline.profiler.report.comparison import Comparison
from paceline.profiler.report.formatting import mean_parts
from paceline.profiler.report.report import Report

# In this order: as it loads, each uses what those before it declare.
SCRIPTS = ("common.js", "lanes.js", "drawing.js", "pointers.js", "timeline.js", "charts.js")
FILES = "paceline.profiler.page"


def page(report: Report) -> str:
    """Return the HTML document of one run."""
    sections = [
        overview.verdict(report),
        overview.advice(report),
        _parts(report),
        charts.timeline(report),
        waits.section(report),
        charts.steps(report),
        tables.operators(report),
        tables.memory(report),
        tables.device(report),
        charts.noise_scale(report),
        overview.missing(report),
    ]
    return _document(f"Profile of {report.title}", [one for one in sections if one is not None])


def comparison_page(comparison: Comparison) -> str:
    """Return the HTML document of two runs side by side."""
    return _document(f"{comparison.names[0]} and {comparison.names[1]}", pair_sections(comparison))


def _parts(report: Report) -> Section | None:
    if not report.ranks:
        return None
    body = '<p class="reading">The mean step of each rank. Its parts add up to its length.</p>'
    body += legend(mean_parts(report)) + rank_bars(report, longest_step(report))
    body += folded("The figures as a table", tables.parts(report))
    return Section("parts", "Where the time goes", "Parts", body)


def _document(title: str, sections: Sequence[Section]) -> str:
    links = "".join(f'<a href="#{one.name}">{one.link}</a>' for one in sections if one.title)
    body = f"""<header class="top"><span class="brand">paceline profile</span><nav aria-label="Sections">{links}</nav>
<button type="button" id="theme">Dark</button></header>
<main>
{"".join(one.html() for one in sections)}
</main>
<footer>Made by <b>paceline profile</b>. This file holds everything that it shows, and fetches nothing.</footer>"""
    # uPlot's licence asks for its notice in every copy.
    plot = f"/* uPlot, {_license()} */\n{resource(FILES, 'static', 'uplot', 'uPlot.iife.min.js')}"
    styles = resource(FILES, "static", "uplot", "uPlot.min.css") + resource(FILES, "static", "page.css")
    return document(title, body, styles, [plot, *(resource(FILES, "static", script) for script in SCRIPTS)])


def _license() -> str:
    """Return uPlot's licence, which stays with every copy of it."""
    return resource(FILES, "static", "uplot", "LICENSE").strip()
