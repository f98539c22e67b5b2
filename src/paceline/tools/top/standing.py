"""The step and phase of each rank, and the rank that the others wait for: plain values and pure functions."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from paceline.core.output.wording import duration
from paceline.core.telemetry.flight_record import WAITING, WEIGHT, Snapshot, is_running, path_of, read_box
from paceline.core.telemetry.job_directory import JobNote

STARTING, RUNNING, ENDED, UNREADABLE = "starting", "running", "ended", "unreadable"
LEAST_SHARE = 0.1
"""Share of a step that the others must wait for a rank, more than it does, to call it slow."""
LEAST_SPREADS = 3.0
"""The same, in standard deviations of the averages that are compared."""
LEAST_STEPS = 5
"""Steps before averages are compared."""
STUCK_S, STUCK_STEPS = 1.0, 3.0
"""Seconds and mean steps that the others have to wait at this moment, to say that a rank keeps them."""


@dataclass(frozen=True)
class Standing:
    """One rank, as the view shows it. Times are in seconds, and None where there is none yet."""

    rank: int
    state: str
    """``starting``: its box is not open yet. ``ended``: its process is gone; the rest is what it did last.
    ``unreadable``: its box is damaged, or another version's."""
    pid: int | None = None
    host: str | None = None
    step: int | None = None
    """The job's last completed step; None where no one has told it."""
    phase: str | None = None
    bucket: int | None = None
    """The bucket that it waits for."""
    phase_seconds: float | None = None
    """How long it has been in the phase; None after its end."""
    step_seconds: float | None = None
    """Moving average; the first step's, while there is no other."""
    last_step_seconds: float | None = None
    waiting_seconds: float | None = None
    """Seconds of waiting in a step, moving average."""
    waiting_spread: float | None = None
    """Standard deviation of a single step's."""
    timed: int = 0
    """How many steps the averages are of."""

    @property
    def waiting_share(self) -> float | None:
        """Waiting as a share of the step."""
        if self.waiting_seconds is None or not self.step_seconds:
            return None
        return min(self.waiting_seconds / self.step_seconds, 1.0)


@dataclass(frozen=True)
class Straggler:
    """The rank that the others wait for."""

    rank: int
    kind: str
    """``slow``: in the average step. ``stuck``: at this moment, for longer than steps take."""
    seconds: float
    """How long the others wait for it, in a step or since they came."""

    def __str__(self) -> str:
        """Say it in one sentence."""
        if self.kind == "stuck":
            return f"rank {self.rank} keeps the others waiting, for {duration(self.seconds)} now"
        return f"rank {self.rank} is slow: the others wait {duration(self.seconds)} a step for it"


def standing_of(snapshot: Snapshot, state: str, now: float) -> Standing:
    """Return where the rank of `snapshot` stands at `now`, on ``time.monotonic``."""
    has_stepped, has_means = snapshot.steps > 0, snapshot.steps > 1
    return Standing(
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


def find_straggler(standings: Sequence[Standing]) -> Straggler | None:
    """Return the rank that the others wait for; None where none stands out, or ranks are missing."""
    if len(standings) < 2 or any(standing.state != RUNNING for standing in standings):
        return None
    return _stuck(standings) or _slow(standings)


def _stuck(standings: Sequence[Standing]) -> Straggler | None:
    """Return the only rank that does not wait, while all others have waited for long."""
    busy = [standing for standing in standings if standing.phase not in WAITING]
    if len(busy) != 1:
        return None
    waited = min(standing.phase_seconds or 0.0 for standing in standings if standing is not busy[0])
    usual = max(standing.step_seconds or 0.0 for standing in standings)
    return Straggler(busy[0].rank, "stuck", waited) if waited > max(STUCK_S, STUCK_STEPS * usual) else None


def _slow(standings: Sequence[Standing]) -> Straggler | None:
    """Return the rank that waits least in the average step, if the others wait clearly more."""
    if any(standing.timed < LEAST_STEPS or standing.waiting_seconds is None for standing in standings):
        return None
    least = min(standings, key=lambda standing: standing.waiting_seconds or 0.0)
    others = [standing for standing in standings if standing is not least]
    gap = median(standing.waiting_seconds or 0.0 for standing in others) - (least.waiting_seconds or 0.0)
    spread = math.hypot(least.waiting_spread or 0.0, median(standing.waiting_spread or 0.0 for standing in others))
    step = median(standing.step_seconds or 0.0 for standing in standings)
    # A moving average of steps with a spread s of their own has the spread s * sqrt(weight / (2 - weight)).
    enough = max(LEAST_SHARE * step, LEAST_SPREADS * spread * math.sqrt(WEIGHT / (2 - WEIGHT)))
    return Straggler(least.rank, "slow", gap) if gap > enough else None


def describe(standings: Sequence[Standing]) -> str:
    """Return one line about the ranks; empty where nothing stands out."""
    ended = [standing for standing in standings if standing.state == ENDED]
    if ended:
        names = ", ".join(str(standing.rank) for standing in ended)
        return f"rank {names} has ended" if len(ended) == 1 else f"ranks {names} have ended"
    if all(standing.state == STARTING for standing in standings):
        return "nothing is known yet: ranks tell from the first forward of Paceline's DistributedDataParallel on"
    straggler = find_straggler(standings)
    return "" if straggler is None else str(straggler)


@dataclass(frozen=True)
class JobView:
    """The ranks of a job as the view shows them."""

    note: JobNote
    standings: list[Standing]
    """Standings of the ranks of this host."""

    def to_json(self) -> dict[str, Any]:
        """Return it as plain values."""
        straggler = find_straggler(self.standings)
        note = self.note
        return {
            "job": {name: value for name, value in asdict(note).items() if name != "processes"},
            "ranks": [asdict(standing) | {"waiting_share": standing.waiting_share} for standing in self.standings],
            "straggler": None if straggler is None else asdict(straggler),
        }


def view_job(folder: Path, note: JobNote) -> JobView:
    """Read where all ranks of this host stand."""
    return JobView(note, [_stand(folder, note, local_rank) for local_rank in range(note.nproc)])


def _stand(folder: Path, note: JobNote, local_rank: int) -> Standing:
    process = note.processes.get(local_rank)
    try:
        snapshot = read_box(path_of(folder, local_rank))
    except FileNotFoundError:  # the job has ended since
        return Standing(local_rank, ENDED, process)
    except (OSError, ValueError):
        return Standing(local_rank, UNREADABLE, process)
    now = time.monotonic()
    if snapshot is not None and is_running(snapshot.pid):
        return standing_of(snapshot, RUNNING, now)
    # A process that lives has not opened its box yet, perhaps after a restart.
    if (process is None and snapshot is None) or (process is not None and is_running(process)):
        return Standing(local_rank, STARTING, process)
    return Standing(local_rank, ENDED, process) if snapshot is None else standing_of(snapshot, ENDED, now)
