"""The summary of a profile in the terminal: the verdict, the parts of each rank's step, and what to change."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from paceline.output_tables import print_table
from paceline.profiler.report import PARTS, Advice, Report
from paceline.profiler.side_by_side import Comparison, Pair
from paceline.profiler.wording import NAMES, kind_name, mean_parts, ms, notable_ranks, percent, rank_parts

MOST_RANKS = 8
"""With more ranks the table has those that say most, and the mean of all."""
MOST_ADVICE = 3
STYLES = {"better": "green", "worse": "red", "": ""}


def print_summary(report: Report) -> None:
    """Print the verdict, the table of parts, the best advice and what could not be seen."""
    console = Console()
    _say(console, Text(report.headline, style="bold"))
    if report.ranks:
        print_table(parts_table(report, between="\n" if console.is_terminal else "  "))
    for number, one in enumerate(report.advice[:MOST_ADVICE], start=1):
        _say(console, advice_line(number, one))
    if len(report.advice) > MOST_ADVICE:
        _say(console, Text(f"{len(report.advice) - MOST_ADVICE} more in the report", style="dim"))
    for sentence in report.missing:
        _say(console, Text(f"not seen: {sentence}", style="dim"))


def parts_table(report: Report, between: str = "  ") -> Table:
    """Return the mean step of each rank, cut into parts; `between` separates a time from its share."""
    parts = {part: seconds for part, seconds in mean_parts(report).items() if seconds > 0}
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("rank", no_wrap=True)
    for heading in ("step", *(NAMES[part] for part in parts)):
        table.add_column(heading, justify="right", min_width=7)
    chosen, slow = notable_ranks(report, MOST_RANKS), {one.rank for one in report.stragglers}
    for at in chosen:
        rank = report.ranks[at].rank
        name = Text(f"{rank} slow" if rank in slow else f"{rank}", style="bold red" if rank in slow else "")
        table.add_row(name, *_cells(rank_parts(report, at), list(parts), between))
    if len(report.ranks) > 1:
        table.add_section()
        table.add_row(f"mean of {len(report.ranks)}", *_cells(mean_parts(report), list(parts), between))
    return table


def _cells(row: Mapping[str, float] | None, parts: Sequence[str], between: str) -> list[str | Text]:
    if row is None:
        return ["no steps", *("–" for _ in parts)]
    total = sum(row[part] for part in PARTS)
    shares = [Text(f"{ms(row[part])}{between}").append(percent(row[part] / (total or 1.0)), "dim") for part in parts]
    return [ms(total), *shares]


def advice_line(number: int, one: Advice) -> Text:
    """Return one piece of advice with its reason and its gain."""
    said = Text(f"{number}. {kind_name(one.kind)}", style="bold")
    if one.gain > 0:
        said.append(f" (saves {percent(one.gain)}, predicted)", "not bold green")
    return said.append(f": {one.text} ", "not bold").append(one.reason, "not bold dim")


def print_comparison(comparison: Comparison) -> None:
    """Print the verdict about two runs, and the figures of both."""
    console = Console()
    _say(console, Text(comparison.headline, style="bold"))
    if comparison.detail:
        _say(console, Text(comparison.detail))
    print_table(comparison_table(comparison))


def comparison_table(comparison: Comparison) -> Table:
    """Return the figures of both runs in columns, with what changed."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("")
    for name in (*comparison.names, "change"):
        table.add_column(Text(name), justify="right")
    for pair in comparison.pairs:
        table.add_row(pair.name, *_pair_cells(pair))
    return table


def _pair_cells(pair: Pair) -> list[str | Text]:
    first, second, change = pair.shown()
    return [first, second, Text(f"{change} {pair.verdict}".rstrip(), style=STYLES[pair.verdict])]


def _say(console: Console, text: Text) -> None:
    # A pipe gets each sentence in one line, whatever width rich assumes there.
    console.print(text, soft_wrap=not console.is_terminal, highlight=False)
