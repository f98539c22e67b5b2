"""Tables that a command prints, whole wherever its output goes."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

UNBOUNDED = 10_000
"""Wider than any table, in characters."""


def new_table(
    columns: Sequence[str],
    *,
    title: str | None = None,
    caption: str | None = None,
    words: Collection[str] = (),
    wraps: Collection[str] = (),
    space: int = 1,
) -> Table:
    """Return an empty table as narrow as its contents, without lines between the columns.

    Args:
        columns: their names.
        title: a line above the table.
        caption: a line below it.
        words: names of the columns that are aligned to the left; the others hold numbers.
        wraps: names of the columns whose cells may wrap; the others are always whole.
        space: characters between two columns, beyond one.
    """
    table = Table(
        title=title,
        title_justify="left",
        caption=caption,
        caption_justify="left",
        box=SIMPLE_HEAD,
        show_edge=False,
        padding=(0, space, 0, 0),
    )
    for name in columns:
        # Of a column that does not wrap, rich asks for no more than the longest word.
        whole = max(map(len, name.split("\n")))
        table.add_column(name, justify="left" if name in words else "right", no_wrap=name not in wraps, min_width=whole)
    return table


def print_table(table: Table) -> None:
    """Print `table` to stdout without cutting a column.

    A pipe or a file has no width, and gets every column as wide as its contents. rich assumes 80 characters there, or
    ``COLUMNS``, and would cut them. On a terminal columns that can wrap do so first.
    """
    console = Console()
    natural = Measurement.get(console, console.options.update(max_width=UNBOUNDED), table)
    console.width = max(console.width, natural.minimum if console.is_terminal else natural.maximum)
    console.print(table)
