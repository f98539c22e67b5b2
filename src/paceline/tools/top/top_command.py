"""``paceline top``: the ranks of a running job, once or live."""

from __future__ import annotations

import json as json_text
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from rich.console import Console
from rich.live import Live

from paceline.core.output.tables import print_table
from paceline.core.output.wording import counted
from paceline.core.telemetry.job_directory import JobNote, running_jobs
from paceline.errors import UsageError
from paceline.tools.top.rank_status import describe, view_job
from paceline.tools.top.table import heading, screen, table_of

PAUSE_S = 0.5
"""Refresh interval in seconds."""


def run_top(job: int | None, json: bool) -> int:
    """Show the ranks of a running job until it ends. With `json`, or if stdout is not a terminal, print them once.

    `job` is the process id of the launcher or of a rank. By default, the job is the one started in the current folder,
    or the only one on this host.
    """
    jobs = running_jobs()
    candidates = choose(jobs, job)
    if len(candidates) > 1:
        print(f"{len(candidates)} jobs are running on this host; choose one with --job PID", file=sys.stderr)
        for _, note in candidates:
            about = f"{note.title}, {counted(note.nproc, 'rank')}, in {note.folder or 'an unknown folder'}"
            print(f"  {process_of(note, jobs)}  {about}", file=sys.stderr)
        return 2
    [(folder, note)] = candidates
    if json:
        print(json_text.dumps(view_job(folder, note).to_json()))
    elif not sys.stdout.isatty():
        view = view_job(folder, note)
        console = Console()
        console.print(heading(view), soft_wrap=True)
        print_table(table_of(view))
        if remark := describe(view.statuses):
            console.print(remark, soft_wrap=True, highlight=False)
    else:
        _follow(folder, note)
    return 0


def choose(jobs: Mapping[Path, JobNote], wanted: int | None) -> list[tuple[Path, JobNote]]:
    """Return the job with the process `wanted`; by default the job started in this folder, or else all jobs."""
    if not jobs:
        raise UsageError("you have no running job on this host; start one with paceline run, train or profile")
    if wanted is None:
        local = [job for job in jobs.items() if job[1].folder == os.getcwd()]
        return local if len(local) == 1 else list(jobs.items())
    candidates = [job for job in jobs.items() if wanted in (job[1].pid, *job[1].processes.values())]
    if not candidates:
        listed = "; ".join(f"{process_of(note, jobs)} ({note.title})" for note in jobs.values())
        raise UsageError(f"--job {wanted} is not a process of a running job; choose one of: {listed}")
    return candidates


def process_of(note: JobNote, jobs: Mapping[Path, JobNote]) -> int:
    """Return the process id that selects the job: its launcher's, or rank 0's if the launcher runs several jobs."""
    launchers = [other.pid for other in jobs.values()]
    return note.pid if launchers.count(note.pid) == 1 else note.processes.get(0, note.pid)


def _follow(folder: Path, note: JobNote) -> None:
    """Show the job until it ends or the user presses Ctrl-C."""
    try:
        # No auto-refresh, because the view changes only when the black boxes are read.
        with Live(screen(view_job(folder, note)), auto_refresh=False) as live:
            while True:
                time.sleep(PAUSE_S)
                # Read the note again each time, because a restart changes it. running_jobs() skips the folder of a
                # killed launcher.
                current = running_jobs().get(folder)
                if current is None:
                    break
                live.update(screen(view_job(folder, current)), refresh=True)
        print("the job has ended")
    except KeyboardInterrupt:
        pass
