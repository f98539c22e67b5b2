"""The folders of running jobs, with the black boxes of their ranks.

A launcher creates ``paceline-job-<random>/`` in the first location with enough space, memory before disk, and passes
the path to its ranks. The environment variable :data:`PARENT` names a location to try first. Only this user can open
the folder:

    job.json    the launcher, its command, and the processes of the ranks
    rank-<n>    the black box of each rank of this host; see :mod:`paceline.core.black_box`
    spare/      a reserved page for each rank's step record, in case memory is full; see :mod:`.step_progress`
    lock        locked while the launcher runs

The locations are open to all users, so folders of other users are ignored. The launcher removes its folder when the job
ends, and its guard (:mod:`paceline.launch.guard`) does so if the launcher is killed. If both are killed, the
next launcher or the next search for jobs removes it.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from paceline.core.black_box import path_of
from paceline.core.rank_page import SIZE, write_page
from paceline.core.step_progress import SPARE, record_path

PARENT = "PACELINE_JOBS"
"""Environment variable with the location of job folders; it must be the same for the launcher and ``paceline top``."""
_PREFIX = "paceline-job-"
_ROOM = 2**20
"""Free bytes per rank that a location should have, for records, per-rank states and a small rescued checkpoint."""
_NOTE, _LOCK = "job.json", "lock"
_UNFINISHED_S = 60.0
"""Seconds until an unfinished folder counts as abandoned."""


@dataclass(frozen=True)
class JobNote:
    """A running job, as its launcher describes it."""

    pid: int
    """Process ID of the launcher."""
    name: str
    """Name of the run."""
    title: str
    """The command that every rank runs."""
    nproc: int
    """Ranks on this host."""
    started: float
    """Seconds since the epoch."""
    folder: str = ""
    """Working directory of the launcher."""
    processes: dict[int, int] = field(default_factory=dict)
    """Process IDs of the ranks, by local rank; empty during the start, or if unknown to the launcher."""


class JobFolder:
    """A launcher's folder; :meth:`remove` it when the job has ended."""

    remark = ""
    """Reason why the folder is not in the first location; empty if it is."""

    def __init__(self, name: str, title: str, nproc: int) -> None:
        self.note = JobNote(os.getpid(), name, title, nproc, time.time(), _current_folder())
        self._lock = -1
        places = _places()
        for folder in [folder for place in places for folder in _folders(place)]:
            _remove_if_stale(folder)
        # A location named by PARENT that has too little space must not keep the job from starting.
        others = [place for place in _usual_places() if place not in places]
        rooms = (_ROOM * (nproc + 1), 0)
        problems: list[str] = []
        for place, room in [(place, room) for group in (places, others) for room in rooms for place in group]:
            try:
                if place == _cache():
                    place.mkdir(mode=0o700, parents=True, exist_ok=True)
                _check_room(place, room)
                self._make(place)
            except OSError as error:
                problems.append(f"{place}: {error.strerror or error}")
            else:
                self.remark = "" if place == places[0] else f"{self.path} ({problems[0]})"
                return
        raise OSError("; ".join(dict.fromkeys(problems)))

    def _make(self, place: Path) -> None:
        # Renamed once it is locked, because a folder without a lock counts as abandoned.
        self.path = Path(tempfile.mkdtemp(prefix=f".{_PREFIX}", dir=place))
        try:
            self._lock = os.open(self.path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX)
            (self.path / SPARE).mkdir(mode=0o700)
            for rank in range(self.note.nproc):
                # Zeros allocate the memory; a hole in the file could later kill the rank with SIGBUS.
                write_page(path_of(self.path, rank), bytes(SIZE))
                write_page(record_path(self.path / SPARE, rank), bytes(SIZE))
            self._write_note(self.note)
            self.path = self.path.rename(self.path.with_name(self.path.name[1:]))
        except BaseException:
            self.remove()
            raise

    def clear(self, ranks: Iterable[int]) -> None:
        """Clear the black boxes of ranks that have ended, before new ranks start."""
        for rank in ranks:
            with suppress(OSError), path_of(self.path, rank).open("r+b") as file:
                file.write(bytes(SIZE))

    def began(self, processes: Mapping[int, int]) -> None:
        """Write the process IDs of ranks that have been started."""
        with suppress(OSError):  # memory is full; the black boxes also have these IDs
            self._write_note(replace(self.note, processes=dict(processes)))

    def _write_note(self, note: JobNote) -> None:
        self.note = note
        new = self.path / f"{_NOTE}.new"
        new.write_text(json.dumps(asdict(note)))
        new.replace(self.path / _NOTE)

    def remove(self) -> None:
        """Remove the folder, if it still exists."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def __enter__(self) -> JobFolder:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()


def running_jobs() -> dict[Path, JobNote]:
    """Return this user's jobs on this host, oldest first, and remove abandoned folders."""
    jobs = {}
    for folder in [folder for place in _places() for folder in _folders(place)]:
        if not _remove_if_stale(folder) and not folder.name.startswith(".") and (note := read_note(folder)) is not None:
            jobs[folder] = note
    return dict(sorted(jobs.items(), key=lambda job: job[1].started))


def read_note(folder: Path) -> JobNote | None:
    """Return the note of a job; None if it has ended."""
    try:
        fields = json.loads((folder / _NOTE).read_text())
        processes = {int(rank): int(pid) for rank, pid in fields.pop("processes").items()}
        return JobNote(**fields, processes=processes)
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None


def _places() -> list[Path]:
    """Return the locations to search for job folders, which are also tried first for a new one."""
    named = os.environ.get(PARENT)
    return [Path(named).absolute()] if named else _usual_places()


def _usual_places() -> list[Path]:
    """Return the usual locations of job folders: in memory, the user's own memory, on disk, the home directory."""
    usual = ("/dev/shm", os.environ.get("XDG_RUNTIME_DIR"), os.environ.get("TMPDIR"), "/tmp", "/var/tmp", _cache())
    return list(dict.fromkeys(Path(place).absolute() for place in usual if place))


def _current_folder() -> str:
    try:
        return os.getcwd()
    except OSError:  # the folder was removed
        return ""


def _cache() -> Path:
    """Return this package's folder in the user's cache; it need not exist."""
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")).absolute() / "paceline"


def _folders(place: Path) -> list[Path]:
    """Return the folders of jobs in `place` that only this user can open; none if `place` cannot be read."""
    try:
        named = [entry for entry in os.scandir(place) if entry.name.lstrip(".").startswith(_PREFIX)]
    except OSError:
        return []
    return [Path(entry.path) for entry in named if _is_own(entry.path)]


def _is_own(path: str) -> bool:
    try:
        status = os.lstat(path)
    except OSError:  # it is gone
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o077


def _check_room(place: Path, size: int) -> None:
    about = os.statvfs(place)
    if about.f_blocks and about.f_bavail * about.f_frsize < size:  # 0 blocks: unknown
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _remove_if_stale(folder: Path) -> bool:
    """Remove `folder` if its launcher has ended; return whether it has."""
    try:
        if folder.name.startswith(".") and time.time() - folder.stat().st_mtime < _UNFINISHED_S:
            return False
        lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:  # partly removed, or just removed by another process
        shutil.rmtree(folder, ignore_errors=True)
        return True
    except OSError:  # the location has become read-only
        return False
    try:
        # Check the lock, not the pid, which may have been reused or belong to another container.
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    else:
        shutil.rmtree(folder, ignore_errors=True)
        return True
    finally:
        os.close(lock)
