"""Bars: a rank's mean step, cut into its parts."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape

from paceline.profiler.report.formatting import ms, percent, rank_parts
from paceline.profiler.report.report import Report
from paceline.profiler.report.step_parts import ALL, MEANINGS, NAMES

ROOMY = 16
"""Most ranks with thick bars; with more the bars are thin, and have no figures."""
LEAST_LABELLED = 0.06
"""Share of the longest bar below which a part has no room for its figure."""


def legend(*bars: Mapping[str, float]) -> str:
    """Name the colours of the parts that `bars` have."""
    return (
        '<ul class="legend">'
        + "".join(
            f'<li data-tip="{escape(MEANINGS[part])}"><i class="p-{part}"></i>{escape(NAMES[part])}</li>'
            for part in ALL
            if any(bar.get(part) for bar in bars)
        )
        + "</ul>"
    )


def longest_step(report: Report) -> float:
    """Return the mean seconds of a step on the rank where it is longest."""
    rows = (rank_parts(report, rank) for rank in range(len(report.ranks)))
    return max((sum(row.values()) for row in rows if row), default=0.0) or 1.0


def rank_bars(report: Report, longest: float) -> str:
    """Draw a bar for each rank; `longest` seconds fill a line."""
    parts = {rank: rank_parts(report, rank) for rank in range(len(report.ranks))}
    slow = {one.rank for one in report.stragglers}
    rows = "".join(
        bar(f"rank {info.rank}", parts[at], longest, straggler=info.rank in slow, with_shares=report.is_firm)
        for at, info in enumerate(report.ranks)
    )
    return f'<div class="bars {"few" if len(report.ranks) <= ROOMY else "many"}" role="list">{rows}</div>'


def bar(
    name: str, parts: Mapping[str, float] | None, longest: float, *, straggler: bool = False, with_shares: bool = True
) -> str:
    """Draw one bar; `longest` seconds fill its line."""
    tag = '<b class="tag">slow</b>' if straggler else ""
    if parts is None:
        return f'<div class="bar" role="listitem"><span class="who">{escape(name)}</span><span>no steps</span></div>\n'
    total = sum(parts.values())
    there = [(part, seconds) for part, seconds in parts.items() if seconds > longest * 1e-4]
    said = ", ".join(f"{NAMES[part]} {ms(seconds)}" for part, seconds in there)
    pieces = "".join(
        f'<i class="p-{part}" style="width:{100 * seconds / longest:.2f}%" data-tip="{escape(name)}: {NAMES[part]} '
        f'{ms(seconds)}{f", {percent(seconds / total)}" if with_shares else ""}">'
        f"{ms(seconds).removesuffix(' ms') if seconds / longest >= LEAST_LABELLED else ''}</i>"
        for part, seconds in there
    )
    return (
        f'<div class="bar" role="listitem" aria-label="{escape(name)}: {ms(total)}: {escape(said)}">'
        f'<span class="who">{escape(name)}{tag}</span><span class="track" aria-hidden="true">{pieces}</span>'
        f'<span class="sum" aria-hidden="true">{ms(total)}</span></div>\n'
    )
