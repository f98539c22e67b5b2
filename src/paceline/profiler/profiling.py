"""The context manager that profiles part of a program."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from paceline.core.output.messages import say
from paceline.errors import UsageError
from paceline.profiler.records.rank_file import FOLDER, is_open

PATIENCE_S = 30.0
"""Seconds that rank 0 waits for the records of the other ranks."""


@contextmanager
def profile(
    folder: str | Path, steps: int | None = None, *, operators: bool = True, noise_scale: bool = False
) -> Iterator[None]:
    """Profile the block on every rank, and write the results into `folder`.

    Skips 3 warm-up steps and the 3 steps that torch's profiler records. A step ends when ``optimizer.step()`` returns.
    When the block ends, rank 0 writes ``report.html``, ``summary.json`` and ``trace.json`` (for Perfetto or
    ``chrome://tracing``). The records of all ranks are in ``ranks/``. If hosts do not share a file system, copy the
    records into one folder and run ``paceline profile report FOLDER``. After an error, the results cover the steps
    before it.

    Args:
        folder: folder for the results, created if missing.
        steps: maximum number of steps to measure; later steps run unmeasured. By default 10,000.
        operators: whether to record 3 steps with torch's profiler, for the table of operators and kernels.
        noise_scale: whether to measure the gradient noise scale, for ``paceline plan``. Every few steps this takes two
            passes over the gradients.
    """
    from paceline.profiler.recording.recorder import Session

    path = Path(folder).absolute()  # the program may change its working directory
    session = Session(path, steps, operators=operators, noise_scale=noise_scale)
    try:
        with session:
            yield
        if session.rank == 0:
            _await_others(path)  # not after an error, because the other ranks may then never leave the block
    finally:
        if session.rank == 0:
            _write(path)


def _await_others(folder: Path) -> None:
    """Wait for the ranks that are still in the block. Not collective, because the group may already be destroyed."""
    others = sorted((folder / FOLDER).glob("rank-*.jsonl"))
    deadline = time.monotonic() + PATIENCE_S
    while any(map(is_open, others)) and time.monotonic() < deadline:
        time.sleep(0.05)


def _write(folder: Path) -> None:
    from paceline.profiler.results import write_results

    try:
        report = write_results(folder)
    except UsageError as error:  # training goes on even if no step was measured
        say(f"paceline: {error}")
    else:
        say(f"paceline: {report.headline} See {folder / 'report.html'}")
