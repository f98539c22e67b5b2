"""Sections of the page that shows two runs side by side."""

from __future__ import annotations

from html import escape

from paceline.profiler.page.elements import Section, table
from paceline.profiler.page.rank_bars import bar, legend, longest_step, rank_bars
from paceline.profiler.report.comparison import Comparison, Pair
from paceline.profiler.report.formatting import kind_name, percent, sentence


def pair_sections(comparison: Comparison) -> list[Section]:
    """Return the sections, the verdict first."""
    runs = zip(comparison.names, (comparison.a, comparison.b), strict=True)
    titles = "; ".join(f"{name}: {run.title}, backend {run.backend}" for name, run in runs)
    verdict = f'<p class="reading">{escape(titles)}</p><h1>{escape(comparison.headline)}</h1>'
    verdict += f"<p>{escape(comparison.detail)}</p>" if comparison.detail else ""
    heads = ["", *map(escape, comparison.names), "change"]
    return [
        Section("verdict", "", "Verdict", verdict),
        Section("parts", "Where the time goes", "Parts", _bars(comparison)),
        Section("figures", "Figures", "Figures", table(heads, map(_row, comparison.pairs), "Figures")),
        Section("ranks", "Rank by rank", "Ranks", _ranks(comparison)),
        Section("advice", "What each run was advised", "Advice", _advice(comparison)),
    ]


def _bars(comparison: Comparison) -> str:
    longest = max(sum(parts.values()) for parts in comparison.parts) or 1.0
    rows = "".join(bar(name, parts, longest) for name, parts in zip(comparison.names, comparison.parts, strict=True))
    reading = f"The mean of all ranks, time for {comparison.basis}; both bars have one scale."
    return f'<p class="reading">{reading}</p>{legend(*comparison.parts)}<div class="bars few" role="list">{rows}</div>'


def _row(pair: Pair) -> list[str]:
    first, second, change = map(escape, pair.shown())
    mark = {"better": "▲", "worse": "▼", "": ""}[pair.verdict]
    said = f'<span class="{pair.verdict}">{change} {mark}<span class="wide"> {pair.verdict}</span></span>'
    return [escape(pair.name), first, second, said if mark else change]


def _ranks(comparison: Comparison) -> str:
    runs = list(zip(comparison.names, (comparison.a, comparison.b), strict=True))
    longest = max(longest_step(run) for _, run in runs)
    columns = "".join(f"<div><h3>{escape(name)}</h3>{rank_bars(run, longest)}</div>" for name, run in runs)
    reading = '<p class="reading">The mean step of each rank; all bars have one scale.</p>'
    return f'{reading}<div class="beside">{columns}</div>'


def _advice(comparison: Comparison) -> str:
    columns = ""
    for name, run in zip(comparison.names, (comparison.a, comparison.b), strict=True):
        items = "".join(
            f"<li><b>{escape(kind_name(one.kind))}</b>, {percent(one.gain)}: {escape(sentence(one.text))}</li>"
            for one in run.advice
        )
        columns += f"<div><h3>{escape(name)}</h3>{f'<ol>{items}</ol>' if items else '<p>Nothing.</p>'}</div>"
    return f'<div class="beside">{columns}</div>'
