"""The command ``paceline top``: a running job's ranks, once or live."""

from __future__ import annotations

import json as json_text
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from rich.console import Console
from rich.live import Live

from paceline.core.output.tables import print_table
from paceline.core.telemetry.job_directory import JobNote, running_jobs
from paceline.errors import UsageError
from paceline.tools.top.rank_status import describe, view_job
from paceline.tools.top.table import heading, screen, table_of

PAUSE_S = 0.5
"""Seconds between two looks at the ranks."""


def run_top(job: int | None, *, once: bool = False, json: bool = False) -> int:
    """Show the ranks of a running job until it ends, or `once`, which is so where stdout is no terminal.

    Args:
        job: the process of its launcher, or of one of its ranks; None where one job runs.
        once: print one table and end.
        json: print the same values once, as one line of JSON.

    Raises:
        UsageError: if there is no such job, or several.
    """
    folder, note = choose(running_jobs(), job)
    if json:
        print(json_text.dumps(view_job(folder, note).to_json()))
    elif once or not sys.stdout.isatty():
        view = view_job(folder, note)
        console = Console()
        console.print(heading(view), soft_wrap=True)
        print_table(table_of(view))
        if remark := describe(view.statuses):
            console.print(remark, soft_wrap=True, highlight=False)
    else:
        _follow(folder, note)
    return 0


def choose(jobs: Mapping[Path, JobNote], wanted: int | None) -> tuple[Path, JobNote]:
    """Return the job with the process `wanted`, or the only one.

    Raises:
        UsageError: if there is none, or it is not clear which.
    """
    if not jobs:
        raise UsageError(
            "no job of yours runs on this host; start one with paceline run, train or profile, which paceline top finds"
        )
    fitting = [(folder, note) for folder, note in jobs.items() if wanted in (None, note.pid, *note.processes.values())]
    if len(fitting) == 1:
        return fitting[0]
    launchers = [note.pid for note in jobs.values()]
    known = "; ".join(
        # Jobs that one launcher runs side by side are told apart by their ranks.
        f"{note.pid if launchers.count(note.pid) == 1 else note.processes.get(0, note.pid)} "
        f"({note.title}, ranks: {note.nproc})"
        for note in jobs.values()
    )
    if not fitting:
        raise UsageError(f"--job {wanted}: no job with this process runs on this host; there are: {known}")
    raise UsageError(f"{len(fitting)} jobs run on this host; choose one with --job PID: {known}")


def _follow(folder: Path, note: JobNote) -> None:
    """Show the job until it ends, or Ctrl-C."""
    try:
        # Refreshed after each look only: in between nothing can have changed.
        with Live(screen(view_job(folder, note)), auto_refresh=False) as live:
            while True:
                time.sleep(PAUSE_S)
                # Asked again each time: a restart changes the note, and a launcher that was killed leaves its folder,
                # which running_jobs() leaves out.
                found = running_jobs().get(folder)
                if found is None:
                    break
                live.update(screen(view_job(folder, found)), refresh=True)
        print("the job has ended")
    except KeyboardInterrupt:
        pass
