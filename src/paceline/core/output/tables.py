"""Tables that a command prints, whole wherever its output goes."""

from __future__ import annotations

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

UNBOUNDED = 10_000
"""Wider than any table, in characters."""


def print_table(table: Table) -> None:
    """Print `table` to stdout without cutting a column.

    A pipe or a file has no width, and gets every column as wide as its contents. rich assumes 80 characters there, or
    ``COLUMNS``, and would cut them. On a terminal columns that can wrap do so first.
    """
    console = Console()
    natural = Measurement.get(console, console.options.update(max_width=UNBOUNDED), table)
    console.width = max(console.width, natural.minimum if console.is_terminal else natural.maximum)
    console.print(table)
