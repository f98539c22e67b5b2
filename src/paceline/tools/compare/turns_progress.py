"""A bar on stderr that shows how many turns the compared modes have taken."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO, cast

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from paceline.core.output.messages import Unfailing
from paceline.tools.compare.turn_taking import turns_of

LOOK_S = 0.2
"""Seconds between two looks at the file of the turns."""


@contextmanager
def showing_turns(file: Path, ranks: int, steps: int) -> Iterator[None]:
    """Show a bar while the block runs, if stderr is a terminal, and remove it afterwards.

    Args:
        file: that of the turns; its length says how far they are.
        ranks: of all modes that take turns.
        steps: optimizer steps that are timed in each mode.
    """
    console = Console(file=cast(TextIO, Unfailing()))
    if not console.is_terminal:
        yield
        return
    is_over = threading.Event()
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("starting", total=ranks * (1 + turns_of(steps)))

        def follow() -> None:
            while not is_over.wait(LOOK_S):
                length = file.stat().st_size
                bar.update(task, completed=length, description="measuring" if length >= ranks else "starting")

        watcher = threading.Thread(target=follow)
        watcher.start()
        try:
            yield
        finally:
            is_over.set()
            watcher.join()
