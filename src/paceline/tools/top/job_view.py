"""A job at one moment: its black boxes, read."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from paceline.core.telemetry.flight_record import is_running, path_of, read_box
from paceline.core.telemetry.job_directory import JobNote
from paceline.tools.top.standing import ENDED, RUNNING, STARTING, UNREADABLE, Standing, find_straggler, standing_of


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
