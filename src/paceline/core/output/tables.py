"""Tables that a command prints, whole wherever its output goes."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Sequence
from copy import copy
from dataclasses import replace

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

    A pipe or a file has no width unless ``COLUMNS`` gives it one, and gets every column as wide as its contents. In a
    given width columns that can wrap do so first; a table that is wider all the same is printed in parts below each
    other, each with the first column.
    """
    console = Console()
    # Without COLUMNS, rich assumes 80 characters for a pipe, and would cut what a program may read.
    if not console.is_terminal and not os.environ.get("COLUMNS", "").isdecimal():
        console.width = _measured(console, table).maximum
        console.print(table)
        return
    for number, part in enumerate(_parts(console, table)):
        if number:
            console.print()
        console.print(part, width=max(console.width, _measured(console, part).minimum))


def _parts(console: Console, table: Table) -> Iterator[Table]:
    """Yield tables that fit the console, with the columns of `table` in their order."""
    chosen = [0]
    for index in range(1, len(table.columns)):
        wider = _part(table, [*chosen, index])
        if len(chosen) > 1 and _measured(console, wider).minimum > console.width:
            yield _part(table, chosen)
            chosen = [0]
        chosen.append(index)
    yield _part(table, chosen)


def _part(table: Table, chosen: Sequence[int]) -> Table:
    """Return a table of the `chosen` columns; the title stands above the first part, the caption below the last."""
    part = copy(table)
    part.title = table.title if chosen[1:2] in ([], [1]) else None
    part.caption = table.caption if chosen[-1] == len(table.columns) - 1 else None
    part.columns = [replace(table.columns[index], _index=place) for place, index in enumerate(chosen)]
    return part


def _measured(console: Console, table: Table) -> Measurement:
    return Measurement.get(console, console.options.update(max_width=UNBOUNDED), table)
