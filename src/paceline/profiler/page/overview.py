"""The first and last sections of a page: the verdict, the advice, and remarks on missing data."""

from __future__ import annotations

from collections import Counter
from html import escape

from paceline.core.output.wording import counted, digits
from paceline.profiler.page.elements import Section, meter
from paceline.profiler.report import step_parts
from paceline.profiler.report.formatting import (
    kind_name,
    ms,
    percent,
    samples_per_second,
    sentence,
    share,
    typical_step,
)
from paceline.profiler.report.report import ENOUGH, Advice, Report

PREDICTED = "Predicted share of all-reduce, by the micro-batches that are accumulated:"


def verdict(report: Report) -> Section:
    """Show the verdict in one sentence, with its main figures."""
    step, rate = typical_step(report), samples_per_second(report)
    tiles = [
        ("step", "–" if step is None else ms(step), "median over ranks and steps"),
        ("samples per second", None if rate is None else digits(rate), "all ranks together"),
        ("computing", share(report, *step_parts.COMPUTE), "forward and backward"),
        ("communication", share(report, step_parts.COMMUNICATION), "exposed: not hidden under backward"),
        ("bubble", share(report, step_parts.BUBBLE), "idle, waiting for a later rank"),
        ("all-reduce", share(report, "allreduce"), "by the time that it or computing runs"),
        ("overlap", report.overlap, "of the all-reduces' time lies under computing"),
    ]
    figures = "".join(
        f"<div><dt>{name}</dt><dd>{_shown(value, report)}</dd><dd class='note'>{escape(note)}</dd></div>"
        for name, value, note in tiles
        if value is not None
    )
    body = (
        f'<p class="program">{escape(report.title)}</p><h1>{escape(report.headline)}</h1>'
        f'<p class="reading">{escape(_circumstances(report))}</p><dl class="figures">{figures}</dl>'
    )
    return Section("verdict", "", "Verdict", body)


def _shown(value: str | float, report: Report) -> str:
    """Return a figure; shares of too few steps say nothing."""
    return value if isinstance(value, str) else percent(value) if report.is_firm else "–"


def _circumstances(report: Report) -> str:
    hosts, devices = {one.host for one in report.ranks}, Counter(one.device for one in report.ranks)
    ran_on = ", ".join(f"{number} × {name}" if number > 1 else name for name, number in devices.items())
    said = [counted(len(report.ranks), "rank"), f"on {counted(len(hosts), 'host')}", f"({ran_on})" if ran_on else ""]
    steps = f"{counted(len(report.steps), 'step')}"
    if report.steps:
        steps += f" ({report.steps[0]}–{report.steps[-1]})"
    return f"{' '.join(filter(None, said))} · backend {report.backend} · {steps}"


def advice(report: Report) -> Section:
    """Show the advice, the best first."""
    if not report.advice:
        found = "Nothing was found that would make this run clearly faster."
        nothing = f"<p>{found if report.is_firm else f'Advice needs {ENOUGH} measured steps.'}</p>"
        return Section("advice", "What to change", "Advice", nothing)
    cards = "".join(map(_card, report.advice))
    return Section("advice", "What to change", "Advice", f'<ol class="cards">{cards}</ol>')


def _card(one: Advice) -> str:
    predicted = "".join(
        f"<div><dt>{escape(times)}</dt><dd>{percent(value)}</dd></div>" for times, value in one.predictions.items()
    )
    gain = f'<p class="gain"><b>{percent(one.gain)}</b> less time for a sample, predicted {meter(one.gain)}</p>'
    more = f'<p class="why">{PREDICTED}</p><dl class="predicted">{predicted}</dl>' if predicted else ""
    return (
        f"<li><h3>{escape(kind_name(one.kind))}</h3>{gain if one.gain > 0 else ''}"
        f'<p class="do">{escape(sentence(one.text))}</p><p class="why">{escape(sentence(one.reason))}</p>{more}</li>'
    )


def missing(report: Report) -> Section | None:
    """Show the missing data, and why."""
    if not report.missing:
        return None
    items = "".join(f"<li>{escape(sentence(one))}</li>" for one in report.missing)
    return Section("missing", "What could not be seen", "Missing", f"<ul>{items}</ul>")
