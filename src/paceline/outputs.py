"""Tables that a command prints, and files that it writes, which are refused before the work if they cannot be."""

from __future__ import annotations

import os
from pathlib import Path

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from paceline.errors import UsageError

UNBOUNDED = 10_000
"""Wider than any table, in characters."""


def check_file(option: str, file: str | None) -> None:
    """Refuse, before the work, a `file` that could not be written after it.

    Raises:
        UsageError: names `option`, such as ``"--json"``, and the reason.
    """
    if file is None:
        return
    path = Path(file).absolute()
    if not path.parent.is_dir():
        raise UsageError(f"{option} {file}: the folder {path.parent} does not exist; make it, or choose another file")
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        reason = "it is a folder" if path.is_dir() else "permission denied"
        raise UsageError(f"{option} {file} cannot be written: {reason}; choose another file")


def write_file(option: str, file: str | None, text: str) -> None:
    """Write `text` to `file`, if there is one.

    Raises:
        UsageError: names `option` and the reason.
    """
    if file is None:
        return
    try:
        Path(file).write_text(text, "utf-8")
    except OSError as error:
        raise UsageError(f"{option} {file} cannot be written: {error.strerror}; choose another file") from error


def print_table(table: Table) -> None:
    """Print `table` to stdout without cutting a column.

    A pipe or a file has no width, and gets every column as wide as its contents; what rich assumes there, 80 characters
    or ``COLUMNS``, would cut them. On a terminal columns that can wrap do so first.
    """
    console = Console()
    natural = Measurement.get(console, console.options.update(max_width=UNBOUNDED), table)
    console.width = max(console.width, natural.minimum if console.is_terminal else natural.maximum)
    console.print(table)
