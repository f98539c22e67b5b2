"""The folders of running jobs, in which launchers keep the black boxes of their ranks.

A launcher makes ``paceline-<user's number>/<its process>-<run's name>/`` in ``/dev/shm``, or where that is not there in
the folder for temporary files; :data:`PARENT` in the environment names another place. It has, open to this user alone:

    job.json    the launcher, its command, and the processes of the ranks
    rank-<n>    the black box of each rank of this host, see :mod:`paceline.black_box`
    lock        locked as long as the launcher lives, however it ends

The launcher removes the folder when the job ends. Folders of launchers that were killed are removed by the next one,
or by whoever looks for jobs.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import stat
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from paceline.black_box import SIZE, path_of

PARENT = "PACELINE_JOBS"
"""Environment variable that names the folder for folders of jobs; launcher and ``paceline top`` have to agree."""
_NOTE, _LOCK = "job.json", "lock"
_UNFINISHED_S = 60.0
"""A folder that is being made and is older was left behind."""


@dataclass(frozen=True)
class JobNote:
    """A running job, as its launcher describes it."""

    pid: int
    """Of the launcher."""
    name: str
    """Of the run."""
    title: str
    """The command that every rank runs."""
    nproc: int
    """Ranks on this host."""
    started: float
    """Seconds since the epoch."""
    processes: dict[int, int] = field(default_factory=dict)
    """Of the ranks, by their number on this host; empty while they are started, or where the launcher cannot know."""


class JobFolder:
    """A launcher's folder; :meth:`remove` it when the job has ended.

    Raises:
        OSError: if it cannot be made.
    """

    def __init__(self, name: str, title: str, nproc: int) -> None:
        base = _own_base()
        for folder in _folders(base):
            _remove_if_stale(folder)
        self.note = JobNote(os.getpid(), name, title, nproc, time.time())
        # A folder without a lock would be taken for a dead launcher's, so it gets its name when it is locked.
        self.path = Path(tempfile.mkdtemp(prefix=".", dir=base))
        self._lock = -1
        try:
            self._lock = os.open(self.path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX)
            for rank in range(nproc):
                _make_file(path_of(self.path, rank))
            self._write_note(self.note)
            number = 0
            while (final := base / _folder_name(self.note, number)).exists():  # one process may launch again
                number += 1
            self.path = self.path.rename(final)
        except BaseException:
            self.remove()
            raise

    def clear(self) -> None:
        """Empty the boxes of ranks that have ended, so that nobody takes them for those of the ranks started next."""
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
    """Return the jobs that this user runs on this host, the oldest first; removes what dead launchers left.

    Raises:
        OSError: if the folders cannot be read.
    """
    base = _base()
    if not base.exists():
        return {}
    _expect_own(base)
    jobs = {}
    for folder in _folders(base):
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


def _base() -> Path:
    shared = Path("/dev/shm")
    default = str(shared) if shared.is_dir() and os.access(shared, os.W_OK) else tempfile.gettempdir()
    return Path(os.environ.get(PARENT) or default) / f"paceline-{os.getuid()}"


def _own_base() -> Path:
    base = _base()
    with suppress(FileExistsError):
        base.mkdir(mode=0o700)
    _expect_own(base)
    return base


def _expect_own(base: Path) -> None:
    """Refuse a folder into which other users can write, as everyone may make folders beside it.

    Raises:
        PermissionError: names it.
    """
    status = os.lstat(base)
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
        raise PermissionError(f"{base} is no folder of user {os.getuid()}; name another place in {PARENT}")
    if status.st_mode & 0o077:
        raise PermissionError(f"{base} is open to other users; run chmod 700 {base}")


def _folder_name(note: JobNote, number: int) -> str:
    name = re.sub(r"[^A-Za-z0-9_.-]", "_", note.name)[:40]
    return f"{note.pid}-{name}" + (f"-{number}" if number else "")


def _folders(base: Path) -> list[Path]:
    return [entry for entry in base.iterdir() if entry.is_dir() and not entry.is_symlink()]


def _remove_if_stale(folder: Path) -> bool:
    """Remove the `folder` of a launcher that is gone; returns whether that was so."""
    try:
        if folder.name.startswith(".") and time.time() - folder.stat().st_mtime < _UNFINISHED_S:
            return False
        lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:  # half removed, or removed since
        shutil.rmtree(folder, ignore_errors=True)
        return True
    try:
        # Locked, and not asked for the process, whose number may be in use again, or be another container's.
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    else:
        shutil.rmtree(folder, ignore_errors=True)
        return True
    finally:
        os.close(lock)


def _make_file(path: Path) -> None:
    """Make an empty box, with memory of its own: one that had none would end its rank with SIGBUS, were memory full."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(descriptor, 0, SIZE)
        else:
            os.write(descriptor, bytes(SIZE))
    finally:
        os.close(descriptor)
