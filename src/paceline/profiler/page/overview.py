"""The first and last sections of a page: the verdict, the advice, and remarks on missing data."""

from __future__ import annotations

from collections import Counter
from html import escape

from paceline.core.output.wording import counted
from paceline.profiler.page.elements import Section, meter
from paceline.profiler.report import step_parts
from paceline.profiler.report.formatting import (
    compute_share,
    figure,
    figure_name,
    kind_name,
    ms,
    percent,
    samples_per_second,
    sentence,
    share,
    shares_only,
    typical_step,
)
from paceline.profiler.report.report import Advice, Report

PREDICTED = {"accumulation": "Predicted share of all-reduce, by the micro-batches that are accumulated:"}
"""Captions of the further figures, by the kind of advice."""


def verdict(report: Report) -> Section:
    """Show the verdict in one sentence, with its main figures."""
    step, rate = typical_step(report), samples_per_second(report)
    tiles = [
        ("step", ms(step) if step is not None else "–", "median over ranks and steps"),
        ("computing", percent(compute_share(report)), "forward and backward"),
        ("communication", percent(share(report, step_parts.COMMUNICATION)), "exposed: not hidden under backward"),
        ("bubble", percent(share(report, step_parts.BUBBLE)), "idle, waiting for a later rank"),
        ("all-reduce", percent(share(report, "allreduce")), "by the time that it or computing runs"),
    ]
    if report.overlap is not None:
        tiles.append(("overlap", percent(report.overlap), "of the all-reduces' time lies under computing"))
    if rate is not None:
        tiles.insert(1, ("samples per second", f"{rate:,.0f}", "all ranks together"))
    figures = "".join(
        f"<div><dt>{escape(figure_name(name))}</dt><dd>{escape(value)}</dd><dd class='note'>{escape(note)}</dd></div>"
        for name, value, note in tiles
    )
    body = (
        f'<p class="program">{escape(report.title)}</p><h1>{escape(report.headline)}</h1>'
        f'<p class="reading">{escape(_circumstances(report))}</p><dl class="figures">{figures}</dl>'
    )
    return Section("verdict", "", "Verdict", body)


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
        nothing = "<p>Nothing was found that would make this run clearly faster.</p>"
        return Section("advice", "What to change", "Advice", nothing)
    cards = "".join(map(_card, report.advice))
    return Section("advice", "What to change", "Advice", f'<ol class="cards">{cards}</ol>')


def _card(one: Advice) -> str:
    as_shares = shares_only(one)
    predicted = "".join(
        f"<div><dt>{escape(figure_name(name))}</dt><dd>{figure(value, as_shares)}</dd></div>"
        for name, value in one.predictions.items()
    )
    after = "" if one.left is None else f"; {percent(one.left)} once the advice before it is followed"
    how_sure = "predicted" if one.is_firm else "provisional: too few steps"
    gain = f'<p class="gain"><b>{percent(one.gain)}</b> less time for a sample, {how_sure}{after} {meter(one.gain)}</p>'
    what = escape(PREDICTED.get(one.kind, "Predicted:"))
    more = f'<p class="why">{what}</p><dl class="predicted">{predicted}</dl>' if predicted else ""
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
