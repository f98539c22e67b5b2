"""The progress of each rank: a page of memory per rank and checkpoint folder, which outlives the rank.

Ranks on the launcher's host keep it in ``<job's folder>/steps/<key of the checkpoint folder>/rank-<n>``. At a restart
the launcher moves it to ``steps-before``. A rank has *prepared* a step when it has its averaged gradients and has
stored its per-rank states. It has *completed* the step when the optimizer has stepped and all registered objects are
consistent again. No optimizer steps before all ranks have prepared the step; see
:class:`paceline.checkpoint.step_boundary.Boundary`. If a rank dies, the others have therefore completed the same
step, or are about to, unless they need that rank for another backward in the same step.

Only the rank itself writes its numbers, each of them atomically.
"""

from __future__ import annotations

import hashlib
import os
import signal
from collections.abc import Mapping
from contextlib import suppress
from enum import IntEnum
from pathlib import Path

from paceline.core.black_box import FOLDER
from paceline.core.rank_page import MAGIC, SIZE, VERSION, Page, field, map_page, write_page

STEPS, BEFORE, RESCUE, SPARE = "steps", "steps-before", "rescue", "spare"
"""Folders in a job's folder: records of the current and the previous start, rescued checkpoints, and reserved pages, so
that a job can restart from disk even if memory is full."""
RESTARTS = "PACELINE_RESTARTS"
"""Environment variable with the number of restarts without progress that our launcher allows."""
STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)
"""Signals that batch systems, service managers and terminals send before they end a job. Ranks that mark their steps
finish the current step first."""
ECHO_S = 0.5
"""Two signals within this many seconds count as one, because batch systems signal all processes and launchers forward
signals."""
SOURCES = (None, "memory", "disk")
"""Sources of a resumed run; a record holds the index. None stands for a new run."""
_LONGEST_FOLDER = 3584
"""Maximum length of the path of a checkpoint folder, in bytes; multiple of 8."""


class Stopping(IntEnum):
    """A rank's answers to a signal that asks it to end. With several Checkpointers, the largest number counts."""

    NOT = 0
    """The rank does not handle the signal; the script or Python does."""
    IN_VAIN = 1
    """The rank has no folder on disk to save a step in, and therefore does not handle the signal."""
    READY = 2
    """On a signal, the rank would finish a step, save it, and end."""
    ASKED = 3
    """The rank has received the signal, and continues to the end of a step."""
    SAVED = 4
    """All ranks have agreed to end after a step, and that step is saved."""


class StepRecord(Page):
    """The record of one rank in the file `path`, whose fields only this rank writes.

    Args:
        path: path of the file, which need not exist if `make` is true.
        make: whether to create the record; if memory is full, it uses the page that the launcher has reserved.
        folder: checkpoint folder of a new record.
    """

    _source: int = field("q")
    restored: int = field("q")
    """The step that this start resumed from; 0 for the beginning."""
    redone: int = field("q")
    """Number of completed steps of earlier starts that had to be computed again."""
    prepared: int = field("q")
    """The last step prepared since this start; -1 for none."""
    completed: int = field("q")
    """The last step completed since this start; -1 for none."""
    is_alone: int = field("q")
    """1 if the optimizer has stepped although other ranks may not have prepared the step."""
    has_ended: int = field("q")
    """1 once the rank has finished training and closed its Checkpointer."""
    has_exited: int = field("q")
    """1 once the interpreter is exiting."""
    pace: float = field("d")
    """Duration of the last step in seconds; 0 if unknown."""
    _even_requests: int = field("q")
    _odd_requests: int = field("q")
    _stopping: int = field("q")
    _stop_signal: int = field("q")
    _stop_step: int = field("q")
    is_durable: int = field("q")
    """1 once this or an earlier start of the job has saved a step to the checkpoint folder."""
    has_lost_save: int = field("q")
    """1 once a due save has failed."""
    virtual_ranks: int = field("q")
    """Number of virtual ranks, which the number of ranks must divide; 0 for none."""
    _folder: bytes = field(f"{_LONGEST_FOLDER}s")

    def __init__(self, path: Path, *, make: bool = False, folder: Path | None = None) -> None:
        if make:
            super().__init__(bytearray(SIZE))
            self.magic, self.version, self.pid = MAGIC, VERSION, os.getpid()
            self.prepared = self.completed = -1
            if folder is not None and len(encoded := os.fsencode(folder)) < _LONGEST_FOLDER:
                self._folder = encoded
            new = path.with_name(f".{path.name}")
            try:
                write_page(new, self.memory)
            except OSError:
                with suppress(FileNotFoundError):
                    # Reuse the spare file, because its page is already allocated.
                    spare_page(path).rename(new)
                write_page(new, self.memory)
            new.replace(path)  # renamed when complete, because the launcher and other ranks read it
        super().__init__(map_page(path, writable=make))
        if (self.magic, self.version) != (MAGIC, VERSION):
            raise ValueError(f"{path} is not a step record")

    @property
    def folder(self) -> Path | None:
        """The checkpoint folder; None if its path is too long for the record."""
        return Path(os.fsdecode(path)) if (path := self._folder.rstrip(b"\0")) else None

    @property
    def source(self) -> str | None:
        """What this start of the rank loaded to resume: one of :data:`SOURCES`."""
        return SOURCES[self._source]

    @property
    def stopping(self) -> Stopping:
        """The rank's answer to a signal that asks it to end."""
        return Stopping(self._stopping)

    @property
    def stopped(self) -> tuple[int, int]:
        """The signal that ended the ranks, and the step that they saved."""
        return self._stop_signal, self._stop_step

    @property
    def has_left(self) -> bool:
        """Whether the rank has exited on its own, not because of a signal."""
        return bool(self.has_ended or self.has_exited)

    @property
    def is_unsaved(self) -> bool:
        """Whether a due save has failed, and no start of the job has saved any step."""
        return bool(self.has_lost_save) and not self.is_durable

    def stop_requests(self, step: int) -> int:
        """Return the rank's stop requests at `step`, as bits; `step` is :attr:`prepared` or the step before it."""
        return self._odd_requests if step % 2 else self._even_requests

    def stop(self, state: Stopping, number: int = 0, step: int = 0) -> None:
        """Record the rank's answer to signals; with ``SAVED``, also the signal and the step."""
        # Written before the state, because the launcher reads both once it sees SAVED.
        self._stop_signal, self._stop_step = number, step
        self._stopping = state

    def restore(self, step: int, source: str | None, redone: int) -> None:
        """Record that the rank resumes from `step`."""
        self.restored, self._source, self.redone = step, SOURCES.index(source), redone

    def prepare(self, step: int, stop_requests: int = 0) -> None:
        """Record that the rank has its averaged gradients of `step` and has stored its per-rank states."""
        # Write the requests before the number that tells other ranks to read them. Two alternating fields are enough,
        # because the barrier of each step keeps this rank from being two steps ahead of a reader.
        if step % 2:
            self._odd_requests = stop_requests
        else:
            self._even_requests = stop_requests
        self.prepared = step

    def complete(self, step: int, seconds: float = 0.0) -> None:
        """Record that all registered objects have reached the end of `step`, which took `seconds`."""
        self.pace = seconds
        self.completed = step


def job_folder(environment: Mapping[str, str] = os.environ) -> Path | None:
    """Return the job's folder under Paceline's launcher if all ranks are on this host, else None."""
    size = environment.get("WORLD_SIZE")
    if not environment.get(FOLDER) or size is None or size != environment.get("LOCAL_WORLD_SIZE"):
        return None
    path = Path(environment[FOLDER])
    return path if path.is_dir() else None


def spare_page(path: Path) -> Path:
    """Return the path of the page that is reserved for the record ``<job's folder>/steps/<key>/rank-<n>``."""
    return path.parent.parent.parent / SPARE / path.name


def key_of(folder: Path) -> str:
    """Return the name under which records and rescued checkpoints of a checkpoint folder are kept."""
    return hashlib.sha256(os.fsencode(folder)).hexdigest()[:16]


def record_path(folder: Path, rank: int) -> Path:
    """Return the path of the record of `rank` in `folder`."""
    return folder / f"rank-{rank}"


def present_records(job: Path) -> dict[str, list[StepRecord]]:
    """Return the records of the current start in the folder of a `job`, by the key of the checkpoint folder."""
    if not (job / STEPS).is_dir():
        return {}
    return {path.name: records for path in sorted((job / STEPS).iterdir()) if (records := records_in(path))}


def records_in(folder: Path) -> list[StepRecord]:
    """Return the readable records in `folder`, which need not exist."""
    records = []
    try:
        paths = sorted(path for path in folder.iterdir() if path.name.startswith("rank-") and not path.suffix)
    except OSError:
        return []
    for path in paths:
        try:
            records.append(StepRecord(path))
        except (OSError, ValueError):
            continue
    return records
