"""A job's view in its launcher's own process, beside the output of the ranks: ``paceline profile --watch``."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TextIO, cast

from rich.console import Console, RenderableType
from rich.live import Live
from rich.text import Text

from paceline.core.output.messages import Unfailing, say
from paceline.core.output.wording import duration
from paceline.core.telemetry.job_directory import running_jobs
from paceline.tools.top.rank_status import JobView, RankStatus, describe, view_job
from paceline.tools.top.table import screen

LOOKS_PER_SECOND = 2.0
LINE_S = 10.0
"""Seconds from one line to the next, where stderr is no terminal."""


def can_draw() -> bool:
    """Return whether the view can stay in one place: on a terminal; elsewhere it is a line now and then."""
    return sys.stderr.isatty()


@contextmanager
def watching() -> Iterator[None]:
    """Show the job that this process launches in the block, on stderr.

    On a terminal the view stays below the output of this process's ``sys.stdout`` and ``sys.stderr``; ranks must not
    write to the terminal themselves. Elsewhere a line is printed every :data:`LINE_S` seconds.
    """
    if can_draw():
        console = Console(file=cast(TextIO, Unfailing()))
        with Live(get_renderable=_screen, console=console, refresh_per_second=LOOKS_PER_SECOND, transient=True):
            yield
        return
    done = threading.Event()
    # A daemon, so that it cannot keep a launcher alive that ends by an error.
    thread = threading.Thread(target=_print_lines, args=(done,), name="paceline-watch", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def line_of(statuses: list[RankStatus]) -> str:
    """Return the view in one line: the step of the slowest rank, the step's time, and a remark as below the table."""
    steps = [status.step for status in statuses if status.step is not None]
    reached = [f"step {min(steps):,}"] if steps and len(steps) == len(statuses) else []
    times = [status.step_seconds for status in statuses if status.step_seconds is not None]
    parts = [*reached, *([f"{duration(max(times))} a step"] if times else []), describe(statuses)]
    return "; ".join(part for part in parts if part)


def own_view() -> JobView | None:
    """Return a view of the job that this process has started; None if it runs none."""
    for folder, note in running_jobs().items():
        if note.pid == os.getpid():
            with suppress(OSError):  # it has just ended
                return view_job(folder, note)
    return None


def _screen() -> RenderableType:
    view = own_view()
    return Text("") if view is None else screen(view)  # before the job, and after it


def _print_lines(done: threading.Event) -> None:
    while not done.wait(LINE_S):
        view = own_view()
        if view is not None:
            say(line_of(view.statuses))
