"""The folders of running jobs, in which launchers keep the black boxes of their ranks.

A launcher makes ``paceline-job-<random>/`` in the first of some places that has room, memory before disk, and tells its
ranks the path; :data:`PARENT` in the environment names a place before all others. It has, open to this user alone:

    job.json    the launcher, its command, and the processes of the ranks
    rank-<n>    the black box of each rank of this host, see :mod:`paceline.core.telemetry.flight_record`
    spare/      a page for each rank's step record, should memory be full by then, see :mod:`.step_progress`
    lock        locked as long as the launcher lives, however it ends

Every user may make folders in these places, so folders of other users are left alone, whatever their names. The
launcher removes its folder when the job ends. Folders of launchers that were killed are removed by the next launcher,
or by the next search for jobs.
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
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from paceline.core.telemetry.flight_record import SIZE, path_of
from paceline.core.telemetry.step_progress import SPARE, record_path

PARENT = "PACELINE_JOBS"
"""Environment variable that names the place for folders of jobs; launcher and ``paceline top`` must have the same."""
_PREFIX = "paceline-job-"
_ROOM = 2**20
"""Free bytes per rank that a place should have, for records, own states and a small rescue."""
_NOTE, _LOCK = "job.json", "lock"
_UNFINISHED_S = 60.0
"""Seconds after which a folder that is still being made counts as left behind."""


@dataclass(frozen=True)
class JobNote:
    """A running job, as its launcher describes it."""

    pid: int
    """Process of the launcher."""
    name: str
    """Name of the run."""
    title: str
    """The command that every rank runs."""
    nproc: int
    """Ranks on this host."""
    started: float
    """Seconds since the epoch."""
    folder: str = ""
    """Folder in which the launcher was started."""
    processes: dict[int, int] = field(default_factory=dict)
    """Processes of the ranks, by local rank; empty while they are started, or where the launcher cannot know."""


class JobFolder:
    """A launcher's folder; :meth:`remove` it when the job has ended."""

    remark = ""
    """Reason why the folder is not in the first place; empty if it is."""

    def __init__(self, name: str, title: str, nproc: int) -> None:
        self.note = JobNote(os.getpid(), name, title, nproc, time.time(), _current_folder())
        self._lock = -1
        places = _places()
        for folder in [folder for place in places for folder in _folders(place)]:
            _remove_if_stale(folder)
        # A named place without room must not keep the job from starting.
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
        # A folder without a lock would be taken for a dead launcher's, so it gets its name when it is locked.
        self.path = Path(tempfile.mkdtemp(prefix=f".{_PREFIX}", dir=place))
        try:
            self._lock = os.open(self.path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX)
            (self.path / SPARE).mkdir(mode=0o700)
            for rank in range(self.note.nproc):
                _make_file(path_of(self.path, rank))
                _make_file(record_path(self.path / SPARE, rank))
            self._write_note(self.note)
            self.path = self.path.rename(self.path.with_name(self.path.name[1:]))
        except BaseException:
            self.remove()
            raise

    def clear(self) -> None:
        """Empty the boxes of ranks that have ended, so that no one takes them for those of the ranks started next."""
        for rank in range(self.note.nproc):
            with suppress(OSError), path_of(self.path, rank).open("r+b") as file:
                file.write(bytes(SIZE))

    def began(self, processes: Mapping[int, int]) -> None:
        """Note the processes of the ranks, which have been started, perhaps again."""
        with suppress(OSError):  # memory is full, for which no job has to end; boxes have their processes, too
            self._write_note(replace(self.note, processes=dict(processes)))

    def _write_note(self, note: JobNote) -> None:
        self.note = note
        new = self.path / f"{_NOTE}.new"
        new.write_text(json.dumps(asdict(note)))
        new.replace(self.path / _NOTE)

    def remove(self) -> None:
        """Remove the folder; harmless when it is gone."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def __enter__(self) -> JobFolder:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()


def running_jobs() -> dict[Path, JobNote]:
    """Return the jobs that this user runs on this host, the oldest first; removes folders of dead launchers."""
    jobs = {}
    for folder in [folder for place in _places() for folder in _folders(place)]:
        if not _remove_if_stale(folder) and not folder.name.startswith(".") and (note := read_note(folder)) is not None:
            jobs[folder] = note
    return dict(sorted(jobs.items(), key=lambda job: job[1].started))


def read_note(folder: Path) -> JobNote | None:
    """Return the note of a job; None when it has ended."""
    try:
        fields = json.loads((folder / _NOTE).read_text())
        processes = {int(rank): int(pid) for rank, pid in fields.pop("processes").items()}
        return JobNote(**fields, processes=processes)
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None


def _places() -> list[Path]:
    """Return the places in which folders of jobs are searched, and made first."""
    named = os.environ.get(PARENT)
    return [Path(named).absolute()] if named else _usual_places()


def _usual_places() -> list[Path]:
    """Return the possible places of folders of jobs: in memory, in the user's own memory, on disk, in the home."""
    usual = ("/dev/shm", os.environ.get("XDG_RUNTIME_DIR"), os.environ.get("TMPDIR"), "/tmp", "/var/tmp", _cache())
    return list(dict.fromkeys(Path(place).absolute() for place in usual if place))


def _current_folder() -> str:
    try:
        return os.getcwd()
    except OSError:  # the folder was removed
        return ""


def _cache() -> Path:
    """Return this package's folder in the user's cache, which need not exist."""
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
    except OSError:  # it has gone
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o077


def _check_room(place: Path, size: int) -> None:
    about = os.statvfs(place)
    if about.f_blocks and about.f_bavail * about.f_frsize < size:  # some file systems do not tell
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _remove_if_stale(folder: Path) -> bool:
    """Remove the `folder` of a launcher that is gone; returns whether that was so."""
    try:
        if folder.name.startswith(".") and time.time() - folder.stat().st_mtime < _UNFINISHED_S:
            return False
        lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:  # half removed, or removed since
        shutil.rmtree(folder, ignore_errors=True)
        return True
    except OSError:  # in a place that is read-only now
        return False
    try:
        # By the lock, and not by the process's number, which may be in use again, or be one of another container.
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    else:
        shutil.rmtree(folder, ignore_errors=True)
        return True
    finally:
        os.close(lock)


def _make_file(path: Path) -> None:
    """Make an empty box with its memory allocated, because a hole in the file would end its rank by SIGBUS later."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(descriptor, 0, SIZE)
        else:
            os.write(descriptor, bytes(SIZE))
    finally:
        os.close(descriptor)
