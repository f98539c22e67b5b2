"""Tables, JSON and warnings as the commands about checkpoints print them."""

from __future__ import annotations

import json as json_text
import math
import sys
from typing import Any

import typer
from rich.table import Table
from rich.text import Text


def make_table(*columns: str) -> Table:
    """Return a table without a frame; columns whose name begins with ``>`` are aligned to the right."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in columns:
        table.add_column(column.removeprefix(">"), justify="right" if column.startswith(">") else "left")
    return table


def add_row(table: Table, *cells: Any) -> None:
    """Add a row of anything, as text that a terminal shows and does not obey."""
    table.add_row(*(Text(printable(str(cell))) for cell in cells))


def printable(text: str) -> str:
    """Return `text`, which may be anybody's, without what a terminal would obey."""
    return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in text)


def print_json(value: Any) -> None:
    """Print `value` as JSON on stdout."""
    typer.echo(json_text.dumps(_plain(value), indent=1))


def _plain(value: Any) -> Any:
    """Return `value` as JSON can hold it; what JSON does not know becomes a string."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, bool | int | str):
        return value
    return value if isinstance(value, float) and math.isfinite(value) else str(value)


def say(text: str) -> None:
    """Print a warning on stderr."""
    print(f"warning: {printable(text)}", file=sys.stderr)
