"""Profiles a part of a program that runs on every rank."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from paceline.core.output.messages import say
from paceline.errors import UsageError
from paceline.profiler.records.rank_file import FOLDER, is_open

PATIENCE_S = 30.0
"""Seconds that rank 0 waits for the end of the others' records."""


@contextmanager
def profile(folder: str | Path, steps: int | None = None, *, operators: bool = True) -> Iterator[None]:
    """Profile the block, which every rank runs, and write the results into `folder`.

    The first 3 steps are not measured, nor are 3 later ones that torch's profiler watches. A step ends with the
    optimizer's. When the block ends, rank 0 writes ``report.html``, ``summary.json`` and ``trace.json``, which Perfetto
    and ``chrome://tracing`` show; each rank's own record is in ``ranks/``. If hosts have no file system in common,
    bring these together, and run ``paceline profile report FOLDER``. After an error the steps before it are written.

    Args:
        folder: folder of the results, made if it is not there.
        steps: number of steps to measure; the block goes on after them. All by default, up to 10,000 steps.
        operators: whether torch's profiler watches 3 steps, for the table of operators and kernels.
    """
    from paceline.profiler.recording.recorder import Session

    path = Path(folder).absolute()  # the program may change its working directory
    session = Session(path, steps, operators=operators)
    try:
        yield
    except BaseException as error:
        # Nobody is waited for: after an error the other ranks may never leave the block.
        session.close(error)
        _write(path, session.rank)
        raise
    session.close()
    if session.rank == 0:
        # Rank 0 may be the first to leave the block, and the others' records are not closed yet.
        _await_others(path)
    _write(path, session.rank)


def _await_others(folder: Path) -> None:
    """Wait for the ranks that are still in the block, without a collective: the group may be destroyed already."""
    others = sorted((folder / FOLDER).glob("rank-*.jsonl"))
    deadline = time.monotonic() + PATIENCE_S
    while any(map(is_open, others)) and time.monotonic() < deadline:
        time.sleep(0.05)


def _write(folder: Path, rank: int) -> None:
    from paceline.profiler.results import write_results

    if rank != 0:
        return
    try:
        report = write_results(folder)
    except UsageError as error:  # nothing was measured, which must not end a training
        say(f"paceline: {error}")
    else:
        say(f"paceline: {report.headline} See {folder / 'report.html'}")
