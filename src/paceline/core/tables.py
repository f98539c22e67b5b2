"""Tables on the terminal, in pipes and in files."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Sequence
from copy import copy
from dataclasses import replace

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.measure import Measurement
from rich.table import Column, Table

UNBOUNDED = 10_000
"""A width, in characters, that exceeds every table."""


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
        columns: names of the columns.
        title: a line above the table.
        caption: a line below the table.
        words: names of the left-aligned columns; the others hold numbers.
        wraps: names of the columns whose cells may wrap.
        space: extra characters between two columns, in addition to the first.
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
        # For a column that does not wrap, rich would reserve only the width of its longest word.
        width = max(map(len, name.split("\n")))
        table.add_column(name, justify="left" if name in words else "right", no_wrap=name not in wraps, min_width=width)
    return table


def print_table(table: Table, keys: int = 1) -> None:
    """Print `table` to stdout without cutting a column.

    In a pipe or file, unless ``COLUMNS`` sets a width, every column is as wide as its contents. Otherwise, long cells
    wrap in columns that allow it. A table that is still too wide is printed in parts, one below the other.

    Args:
        table: the table to print. Columns may wrap unless they have ``no_wrap``.
        keys: number of leading columns that identify a row; they are repeated in each part.
    """
    console = Console()
    # Without COLUMNS, rich assumes 80 characters for a pipe and would cut the output.
    if not console.is_terminal and not os.environ.get("COLUMNS", "").isdecimal():
        console.width = _measured(console, table).maximum
        console.print(table)
        return
    for number, part in enumerate(list(_parts(console, table, keys))):
        if number:
            console.print()
        # If a single column is too wide, let the terminal break the lines; rich would cut them.
        console.width = max(console.width, _measured(console, part).minimum)
        console.print(part)


def _parts(console: Console, table: Table, keys: int) -> Iterator[Table]:
    """Split `table` by columns into tables that fit the console."""
    columns = [_whole(console, column) for column in table.columns]
    chosen = columns[:keys]
    for column in columns[keys:]:
        is_too_wide = _measured(console, _part(table, [*chosen, column])).minimum > console.width
        if is_too_wide and len(chosen) > keys:
            yield _part(table, chosen)
            chosen = columns[:keys]
        chosen = [*chosen, column]
    yield _part(table, chosen)


def _whole(console: Console, column: Column) -> Column:
    """Return `column` with the minimum width that keeps rich from cutting its cells."""
    options = console.options.update(max_width=UNBOUNDED)
    widths = [Measurement.get(console, options, cell) for cell in (column.header, *column.cells)]
    min_width = max(width.maximum if column.no_wrap else width.minimum for width in widths)
    return replace(column, min_width=max(min_width, column.min_width or 0))


def _part(table: Table, columns: Sequence[Column]) -> Table:
    """Return a part of `table` with these columns. The first part has the title, the last part the caption."""
    part = copy(table)
    part.columns = [replace(column, _index=place) for place, column in enumerate(columns)]
    places = [column._index for column in columns]
    part.title = table.title if places == list(range(len(places))) else None
    part.caption = table.caption if places[-1] == len(table.columns) - 1 else None
    return part


def _measured(console: Console, table: Table) -> Measurement:
    return Measurement.get(console, console.options.update(max_width=UNBOUNDED), table)
