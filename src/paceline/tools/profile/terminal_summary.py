"""Terminal summary of a profile: headline, parts of each rank's step, and advice."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import fmean

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from paceline.core.output.tables import print_table
from paceline.planner.critical_batch import verdict
from paceline.profiler.analysis.analyze import Report
from paceline.profiler.analysis.facts import Facts
from paceline.profiler.report import step_parts
from paceline.profiler.report.advice import Advice
from paceline.profiler.report.formatting import kind_name, ms, percent, sentence

MOST_RANKS = 5
"""Maximum number of ranks in the table. For larger jobs, it has only the most notable ranks and the mean."""
MOST_ADVICE = 3


def print_summary(report: Report) -> None:
    """Print the headline, the parts of a step, the best advice, the critical batch size and what is missing."""
    console = Console()
    _print(console, Text(report.headline, style="bold"))
    print_table(parts_table(report.facts, between="\n" if console.is_terminal else "  "))
    for number, advice in enumerate(report.advice[:MOST_ADVICE], start=1):
        _print(console, advice_line(number, advice))
    if len(report.advice) > MOST_ADVICE:
        _print(console, Text(f"{len(report.advice) - MOST_ADVICE} more in the report", style="dim"))
    if (scale := report.facts.noise_scale) is not None:
        _print(console, Text(verdict(scale.batch, scale.value)))
    for unseen in report.missing:
        _print(console, Text(f"not seen: {unseen}", style="dim"))


def parts_table(facts: Facts, between: str = "  ") -> Table:
    """Return a table of the parts of an average step on each rank; `between` separates a time from its share."""
    slow = {straggler.rank for straggler in facts.stragglers}
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("a step")
    shown = facts.accounts.notable_ranks(MOST_RANKS)
    columns = [facts.rank_parts[rank] for rank in shown]
    for rank in shown:
        heading = Text(f"rank {rank}\nslow", style="bold red") if rank in slow else Text(f"rank {rank}")
        table.add_column(heading, justify="right", min_width=7)
    if len(shown) > 1:
        table.add_column(Text(f"mean\nof {len(facts.records)}"), justify="right", min_width=7)
        columns.append(facts.mean_parts)
    table.add_row("length", *(ms(sum(row.values())) if row else "no steps" for row in columns), end_section=True)
    for part, seconds in facts.mean_parts.items():
        if seconds > 0:
            cells = [_cell(row, part, between, with_shares=facts.is_firm) for row in columns]
            table.add_row(step_parts.NAMES[part], *cells)
    # Garbage collection is not a separate part, because it can happen during any of them.
    if any(pauses := [facts.collecting[rank] for rank in shown if facts.collecting]):
        mean = [ms(fmean(facts.collecting))] if len(shown) > 1 else []
        table.add_row("of which garbage collection", *map(ms, pauses), *mean)
    return table


def _cell(row: Mapping[str, float] | None, part: str, between: str, *, with_shares: bool) -> str | Text:
    if row is None:
        return "–"
    if not with_shares:
        return ms(row[part])
    return Text(f"{ms(row[part])}{between}").append(f"{percent(row[part] / (sum(row.values()) or 1.0)):>5}", "dim")


def advice_line(number: int, advice: Advice) -> Text:
    """Return one piece of advice with its reason and predicted gain."""
    line = Text(f"{number}. {kind_name(advice.kind)}", style="bold")
    if advice.gain > 0:
        line.append(f" (saves {percent(advice.gain)}, predicted)", "not bold green")
    return line.append(f": {sentence(advice.text)} ", "not bold").append(sentence(advice.reason), "not bold dim")


def _print(console: Console, text: Text) -> None:
    # Records are untrusted, so keep control characters and megabytes of text out of the terminal.
    text.plain = "".join(letter if letter.isprintable() else "�" for letter in text.plain[:2000])
    # rich assumes an arbitrary width for a pipe, so do not wrap lines in one.
    console.print(text, soft_wrap=not console.is_terminal, highlight=False)
