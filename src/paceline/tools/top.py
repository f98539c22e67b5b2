"""``paceline top``: the ranks of a running job, once or live, and the rank that the others wait for.

The values come from the ranks' black boxes (:mod:`paceline.core.black_box`).
"""

from __future__ import annotations

import json as json_text
import math
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from paceline.core.black_box import WAITING, WEIGHT, Snapshot, path_of, read_box
from paceline.core.host import is_running
from paceline.core.job_directory import JobNote, running_jobs
from paceline.core.messages import counted, duration
from paceline.core.tables import print_table
from paceline.errors import UsageError

STARTING, RUNNING, ENDED, UNREADABLE = "starting", "running", "ended", "unreadable"
LEAST_SHARE = 0.1
"""A rank counts as slow if the others wait at least this share of a step longer than it does."""
LEAST_SPREADS = 3.0
"""To rule out noise, the extra waiting time must also be at least this many standard deviations."""
LEAST_STEPS = 5
"""Number of steps before averages are compared."""
STUCK_S, STUCK_STEPS = 1.0, 3.0
"""A rank counts as stuck once the others have waited this many seconds and this many average steps."""
BAR = 20
"""Width of a step's bar, in characters."""
NOTHING = "–"
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


@dataclass(frozen=True)
class RankStatus:
    """Status of one rank. Times are in seconds, or None if not yet known."""

    rank: int
    state: str
    """``starting`` (no black box yet), ``running``, ``ended`` (the other fields hold its last values) or ``unreadable``
    (the black box is damaged or has another version)."""
    pid: int | None = None
    host: str | None = None
    step: int | None = None
    """Last completed step of the job, if known."""
    phase: str | None = None
    bucket: int | None = None
    """Index of the bucket that the rank waits for."""
    phase_seconds: float | None = None
    """Seconds since the phase began; None for a rank that has ended."""
    step_seconds: float | None = None
    """Moving average of the step time; after one step, the time of that step."""
    last_step_seconds: float | None = None
    waiting_seconds: float | None = None
    """Moving average of the waiting time in a step."""
    waiting_spread: float | None = None
    """Standard deviation of the waiting time in a step."""
    timed: int = 0
    """Number of steps in the averages."""

    @property
    def waiting_share(self) -> float | None:
        """Waiting time as a share of the step time."""
        if self.waiting_seconds is None or not self.step_seconds:
            return None
        return min(self.waiting_seconds / self.step_seconds, 1.0)


@dataclass(frozen=True)
class Straggler:
    """The rank that the others wait for."""

    rank: int
    kind: str
    """``slow`` (in the average step) or ``stuck`` (right now, for longer than a step takes)."""
    seconds: float
    """How long the others wait: per step if the rank is slow, so far if it is stuck."""

    def __str__(self) -> str:
        """Return the remark that the user sees."""
        if self.kind == "stuck":
            return f"rank {self.rank} has kept the others waiting for {duration(self.seconds)}"
        return f"rank {self.rank} is slow: the others wait {duration(self.seconds)} per step for it"


def status_of(snapshot: Snapshot, state: str, now: float) -> RankStatus:
    """Return the status in `snapshot`; `now` is the current ``time.monotonic()``."""
    has_stepped, has_means = snapshot.steps > 0, snapshot.steps > 1
    return RankStatus(
        snapshot.rank,
        state,
        snapshot.pid,
        snapshot.host,
        snapshot.completed,
        snapshot.phase,
        snapshot.bucket,
        max(now - snapshot.since, 0.0) if state == RUNNING else None,
        snapshot.mean_step if has_means else snapshot.step if has_stepped else None,
        snapshot.step if has_stepped else None,
        snapshot.mean_waited if has_means else None,
        snapshot.waited_spread if has_means else None,
        snapshot.steps,
    )


def find_straggler(statuses: Sequence[RankStatus]) -> Straggler | None:
    """Return the rank that the others wait for, if one stands out."""
    # If a rank is not running, it is the one that the others wait for.
    if len(statuses) < 2 or any(status.state != RUNNING for status in statuses):
        return None
    return _stuck(statuses) or _slow(statuses)


def _stuck(statuses: Sequence[RankStatus]) -> Straggler | None:
    """Return the only busy rank, if all others have waited for a long time."""
    busy = [status for status in statuses if status.phase not in WAITING]
    if len(busy) != 1:
        return None
    waited = min(status.phase_seconds or 0.0 for status in statuses if status is not busy[0])
    usual = max(status.step_seconds or 0.0 for status in statuses)
    return Straggler(busy[0].rank, "stuck", waited) if waited > max(STUCK_S, STUCK_STEPS * usual) else None


def _slow(statuses: Sequence[RankStatus]) -> Straggler | None:
    """Return the rank that waits least on average, if the others wait significantly longer."""
    if any(status.timed < LEAST_STEPS or status.waiting_seconds is None for status in statuses):
        return None
    slowest = min(statuses, key=lambda status: status.waiting_seconds or 0.0)
    others = [status for status in statuses if status is not slowest]
    gap = median(status.waiting_seconds or 0.0 for status in others) - (slowest.waiting_seconds or 0.0)
    spread = math.hypot(slowest.waiting_spread or 0.0, median(status.waiting_spread or 0.0 for status in others))
    step = median(status.step_seconds or 0.0 for status in statuses)
    # If values have standard deviation s, their moving average has s * sqrt(weight / (2 - weight)).
    enough = max(LEAST_SHARE * step, LEAST_SPREADS * spread * math.sqrt(WEIGHT / (2 - WEIGHT)))
    return Straggler(slowest.rank, "slow", gap) if gap > enough else None


def describe(statuses: Sequence[RankStatus]) -> str:
    """Return a one-line remark about ended ranks or a straggler; empty if all is well."""
    ended = [status for status in statuses if status.state == ENDED]
    if ended:
        names = ", ".join(str(status.rank) for status in ended)
        return f"rank {names} has ended" if len(ended) == 1 else f"ranks {names} have ended"
    if all(status.state == STARTING for status in statuses):
        return "waiting for the first forward of paceline.DistributedDataParallel"
    straggler = find_straggler(statuses)
    return "" if straggler is None else str(straggler)


@dataclass(frozen=True)
class JobView:
    """A snapshot of a job."""

    note: JobNote
    statuses: list[RankStatus]
    """Statuses of the ranks on this host, by local rank."""

    def to_json(self) -> dict[str, Any]:
        """Return the snapshot as values for JSON."""
        straggler = find_straggler(self.statuses)
        note = self.note
        return {
            "version": 1,
            "job": {name: value for name, value in asdict(note).items() if name != "processes"},
            "ranks": [asdict(status) | {"waiting_share": status.waiting_share} for status in self.statuses],
            "straggler": None if straggler is None else asdict(straggler),
        }


def view_job(folder: Path, note: JobNote) -> JobView:
    """Read the black boxes of all ranks on this host."""
    # After a restart, a job may have fewer ranks than `nproc`.
    ranks = sorted(note.processes) or range(note.nproc)
    return JobView(note, [_read_status(folder, note, local_rank) for local_rank in ranks])


def _read_status(folder: Path, note: JobNote, local_rank: int) -> RankStatus:
    process = note.processes.get(local_rank)
    try:
        snapshot = read_box(path_of(folder, local_rank))
    except FileNotFoundError:  # the job has just ended
        return RankStatus(local_rank, ENDED, process)
    except (OSError, ValueError):
        return RankStatus(local_rank, UNREADABLE, process)
    now = time.monotonic()
    if snapshot is not None and is_running(snapshot.pid):
        return status_of(snapshot, RUNNING, now)
    # The box is empty, or the process that wrote it has ended. If the rank's process is alive, it has not opened the
    # box yet.
    if (process is None and snapshot is None) or (process is not None and is_running(process)):
        return RankStatus(local_rank, STARTING, process)
    return RankStatus(local_rank, ENDED, process) if snapshot is None else status_of(snapshot, ENDED, now)


def heading(view: JobView) -> Text:
    """Return the line above the table."""
    note = view.note
    return Text(f"job {note.pid}: {note.title}, {counted(note.nproc, 'rank')}", style="bold")


def table_of(view: JobView) -> Table:
    """Return a table with a row for each rank on this host."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for name in ("rank", "step", "phase", "for", "step time", "waiting"):
        table.add_column(name, justify="left" if name in ("rank", "phase") else "right", no_wrap=True)
    table.add_column(justify="right", no_wrap=True)  # the waiting share as a number; the next column draws it
    table.add_column(Text.assemble("█ busy ", ("░ waiting", "yellow")), no_wrap=True)
    straggler = find_straggler(view.statuses)
    for status in view.statuses:
        slow = straggler is not None and straggler.rank == status.rank
        table.add_row(*_cells(status), style="bold red" if slow or status.state == ENDED else "")
    return table


def _cells(status: RankStatus) -> list[str | Text]:
    share = status.waiting_share
    return [
        str(status.rank),
        NOTHING if status.step is None else f"{status.step:,}",
        phase_of(status),
        _or_nothing(status.phase_seconds),
        _or_nothing(status.step_seconds),
        _or_nothing(status.waiting_seconds),
        "" if share is None else f"{100 * share:.0f} %",
        "" if share is None else bar(share),
    ]


def phase_of(status: RankStatus) -> str:
    """Return the rank's phase, or if the rank is not running, its state and last phase."""
    phase = status.phase if status.bucket is None else f"{status.phase} {status.bucket}"
    if status.state == RUNNING:
        return str(phase)
    return f"{status.state}, in {phase}" if phase else status.state


def bar(waiting_share: float) -> Text:
    """Return a bar of the step: busy time first, then waiting time."""
    waiting = round(BAR * waiting_share)
    return Text.assemble("█" * (BAR - waiting), ("░" * waiting, "yellow"))


def screen(view: JobView) -> RenderableType:
    """Return the whole view: heading, table, and a remark about stragglers or ended ranks."""
    remark = describe(view.statuses)
    return Group(heading(view), table_of(view), *([Text(remark, style="bold")] if remark else []))


def _or_nothing(seconds: float | None) -> str:
    return NOTHING if seconds is None else duration(seconds)
