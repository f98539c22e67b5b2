"""The black box: a page of memory with a rank's current phase, which other processes can read at any time.

The launcher makes a file for each of its ranks; see :mod:`paceline.core.job_directory` and
:mod:`paceline.core.rank_page`. The table of the fields is :class:`Snapshot`. To show another number in ``paceline
top``, add a line to the table, write it in :class:`BlackBox`, and show it in ``tools/top.py``.

Times are seconds of ``time.monotonic()``, one clock for all processes of a host. They are measured on the host: on a
GPU, a rank waits for others in its stream, which the host does not see.

This module does not import torch, because ``paceline top`` and the launcher's watch read black boxes.
"""

from __future__ import annotations

import logging
import math
import multiprocessing
import os
import platform
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.core.host import is_running
from paceline.core.rank_page import MAGIC, SIZE, VERSION, Page, field, map_page

FOLDER = "PACELINE_BLACK_BOX"
"""Environment variable with the folder of the black boxes, set by our launcher."""
UNKNOWN = -1
"""Value for an unknown step of the job."""
_OF_STEPS = "loop", "data wait", "forward", "backward", "wait", "bucket wait", "optimizer", "checkpoint"
PHASES = (*_OF_STEPS, "collective", "outer step")
"""Phases of a rank; a page holds the index. ``loop`` is everything between the others."""
LOOP, DATA_WAIT, FORWARD, BACKWARD, WAIT, BUCKET_WAIT, OPTIMIZER, CHECKPOINT = range(len(_OF_STEPS))
COLLECTIVE, OUTER_STEP = range(len(_OF_STEPS), len(PHASES))
WAITING = frozenset(("wait", "bucket wait", "collective", "outer step"))
"""Phases that wait for other ranks or their data."""
WEIGHT = 0.1
"""Weight of the last step in moving averages."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Raised:
    """The innermost phase that the latest exception left."""

    phase: str
    bucket: int | None
    since: float
    until: float
    """End of the outermost phase that the exception has left."""


class Snapshot(Page):
    """The state of a rank at one moment: its step, its phase, and how long it has waited.

    If it was read during a write, a time may be wrong.
    """

    rank: int = field("q")
    size: int = field("q")
    """World size."""
    host_name: bytes = field("200s")

    phase_index: int = field("q")
    bucket_number: int = field("q")
    since: float = field("d")
    """Start of the phase by ``time.monotonic``, the clock of all times here."""

    steps: int = field("q")
    """Number of steps that this process has timed, from a forward of Paceline's wrapper to the end of an optimizer
    step."""
    stepped: float = field("d")
    """End of the last timed step; 0.0 before the first."""
    step: float = field("d")
    """Seconds of the last step."""
    mean_step: float = field("d")
    """Moving average of the seconds per step, without the first (warm-up) step; 0.0 before the second."""
    waited: float = field("d")
    """Seconds that the last step spent in :data:`WAITING` phases."""
    mean_waited: float = field("d")
    """Moving average of the seconds waited per step, without the first step."""
    waited_variance: float = field("d")

    raised_phase: int = field("q")
    raised_bucket: int = field("q")
    raised_since: float = field("d")
    raised_until: float = field("d")

    job_step: int = field("q")
    """Last completed step of the job, including earlier starts, or :data:`UNKNOWN`."""
    first_step: int = field("q")
    """The step from which this start of the ranks continues."""

    @property
    def host(self) -> str:
        """Name of the rank's host."""
        return self.host_name.rstrip(b"\0").decode(errors="replace")

    @property
    def phase(self) -> str:
        """One of :data:`PHASES`."""
        return _name(self.phase_index)

    @property
    def bucket(self) -> int | None:
        """Bucket that the rank waits for, in ``bucket wait``."""
        return _bucket(self.bucket_number)

    @property
    def waited_spread(self) -> float:
        """Moving standard deviation of the seconds waited per step."""
        return math.sqrt(max(self.waited_variance, 0.0))

    @property
    def raised(self) -> Raised | None:
        """Phase that an exception has left, unless another phase has begun since."""
        if self.raised_until != self.since:
            return None
        bucket = _bucket(self.raised_bucket)
        return Raised(_name(self.raised_phase), bucket, self.raised_since, self.raised_until)

    @property
    def completed(self) -> int | None:
        """Last completed step of the job, including earlier starts; None if unknown."""
        return None if self.job_step == UNKNOWN else self.job_step

    @property
    def has_stepped(self) -> bool:
        """Whether this process has completed a step."""
        return self.steps > 0 or self.job_step > self.first_step


def _name(phase: int) -> str:
    return PHASES[phase] if 0 <= phase < len(PHASES) else f"phase {phase}"  # of a damaged page


def _bucket(number: int) -> int | None:
    return number if number >= 0 else None


_MAGIC = Snapshot.area("magic")
_HEAD = Snapshot.area("version", "host_name")
_PHASE = Snapshot.area("phase_index", "since")
_STEP = Snapshot.area("steps", "waited_variance")
_RAISED = Snapshot.area("raised_phase", "raised_until")
_JOB = Snapshot.area("job_step", "first_step")


def path_of(folder: Path, local_rank: int) -> Path:
    """Return the path of the file of the rank with this local rank."""
    return folder / f"rank-{local_rank}"


def read_box(path: Path) -> Snapshot | None:
    """Return the rank's state now; None if no rank has opened the black box yet."""
    with map_page(path) as memory:
        box = Snapshot(memory[: Snapshot.end])
    if box.magic != MAGIC:
        return None
    if box.version != VERSION:
        raise ValueError(f"the black box {path} has version {box.version}, but this Paceline reads version {VERSION}")
    return box


def snapshot_of(folder: Path, local_rank: int) -> Snapshot | None:
    """Return the state of a rank now; None if there is none yet, or if it is missing or damaged."""
    try:
        return read_box(path_of(folder, local_rank))
    except (OSError, ValueError):
        return None


class BlackBox:
    """This rank's black box, for writing. Only the thread that runs the training step writes.

    A Checkpointer marks the job's steps. Without a Checkpointer, the black box counts the steps that it times. It
    starts at the restored step, or at 0 in the first start of the ranks. The step is unknown in other cases, or if
    several wrappers are trained alternately.

    Args:
        path: path of the file.
        rank: rank of this process.
        size: world size.
        is_first_start: whether this is the launcher's first start of the ranks.
    """

    phase: int
    """Index of the current phase in :data:`PHASES`."""

    def __init__(self, path: Path, rank: int, size: int, is_first_start: bool = True) -> None:
        self._map: Any = map_page(path, writable=True)
        self.phase = LOOP
        self._steps = 0
        self._began: float | None = None
        """Start of the current step; None before the first forward."""
        self._is_due = False
        """Whether a forward has run since the last step ended."""
        self._start = 0 if is_first_start else UNKNOWN
        """The step from which this start of the ranks continues."""
        self.completed = UNKNOWN
        """Last completed step of the job."""
        self._is_marked: bool | None = None
        """Whether a Checkpointer marks steps; None without a Checkpointer."""
        self._counted = 0
        """Number of steps since this start that no Checkpointer has marked."""
        self.owner = self._owner = 0
        """Wrapper whose parameters an optimizer is updating, and the first such wrapper; 0 for none."""
        self._waited = self._mean = self._mean_waited = self._variance = 0.0
        self._phases = {PHASES[number]: _KINDS.get(number, _Phase)(self, number) for number in range(1, len(PHASES))}
        """Context managers of the phases, reused several times in each step."""
        self.bucket = -1
        """Bucket that the next wait is for."""
        os.register_at_fork(after_in_child=self._detach)
        self._map[:] = bytes(SIZE)  # clear the page of the rank's process before a restart
        self.change(LOOP)
        self._write_job(UNKNOWN)
        self._map[_HEAD.place] = _HEAD.pack(VERSION, os.getpid(), rank, size, platform.node().encode()[:200])
        self._map[_MAGIC.place] = _MAGIC.pack(MAGIC)  # written last, because it marks the page as complete

    def _detach(self) -> None:
        """In a forked child, write to private memory, because the page belongs to the parent."""
        self._map = bytearray(SIZE)

    def span(self, label: str, bucket: int | None = None) -> AbstractContextManager[None] | None:
        """Return a context manager for the phase `label`; None if it is not in :data:`PHASES`."""
        if bucket is not None:
            self.bucket = bucket
        return self._phases.get(label)

    def change(self, phase: int, bucket: int = -1) -> float:
        """Record that `phase` begins; return the time."""
        self.phase, now = phase, time.monotonic()
        self._map[_PHASE.place] = _PHASE.pack(phase, bucket, now)
        return now

    def leave(self, outer: int, kind: object) -> float:
        """Record that the current phase has ended and `outer` continues; return the time.

        `kind` is the class of the exception that left the phase, or None. Of the phases that an exception leaves, the
        innermost is kept.
        """
        if kind is None or (isinstance(kind, type) and issubclass(kind, (StopIteration, GeneratorExit))):
            return self.change(outer)
        written, earlier = _PHASE.unpack(self._map[_PHASE.place]), _RAISED.unpack(self._map[_RAISED.place])
        now = self.change(outer)
        origin = earlier[:3] if earlier[3] == written[2] else written
        self._map[_RAISED.place] = _RAISED.pack(*origin, now)
        return now

    def add_wait(self, seconds: float) -> None:
        """Add a wait to the current step."""
        self._waited += seconds

    def forward_began(self, now: float) -> None:
        """Begin a step; it ends with the next optimizer step."""
        self._is_due = True
        if self._began is None:
            self._began = now
            if self.completed == UNKNOWN and not self._is_marked:
                self._write_job(self._start)

    def optimizer_ended(self, now: float) -> None:
        """End the step, unless another optimizer has done so since the last forward."""
        if not self._is_due or self._began is None:
            return
        self._is_due = False
        seconds, waited = now - self._began, self._waited
        self._steps += 1
        if self._steps > 1:
            # Start with the plain mean, because with a constant weight the average would take dozens of steps to rise
            # from 0.
            weight = max(1 / (self._steps - 1), WEIGHT)
            self._mean += weight * (seconds - self._mean)
            difference = waited - self._mean_waited
            self._mean_waited += weight * difference
            self._variance = (1 - weight) * (self._variance + weight * difference * difference)
        means = self._mean, waited, self._mean_waited, self._variance
        self._map[_STEP.place] = _STEP.pack(self._steps, now, seconds, *means)
        self._began, self._waited = now, 0.0
        self._owner = self._owner or self.owner
        if not self._is_marked and self.completed != UNKNOWN:
            self._counted += 1
            if self.owner != self._owner:
                self._write_job(UNKNOWN)
            elif self._counted > 1 or self._is_marked is None:  # a Checkpointer may be about to mark the first step
                self._write_job(self._start + self._counted)

    def go_on_from(self, step: int) -> None:
        """Set the job's last completed step to the restored `step`; 0 is written at the first forward."""
        self._start, self._is_marked, self._counted = step, False, 0
        if step or self.completed != UNKNOWN:
            self._write_job(step)

    def mark(self, step: int) -> None:
        """Set the job's last completed step to `step`, which a Checkpointer has marked."""
        self._is_marked = True
        self._write_job(step)

    def lose_count(self) -> None:
        """Mark the job's step as unknown when an uncounted optimizer steps, unless steps are timed or marked."""
        if self._began is None and not self._is_marked:
            self._start = UNKNOWN
            if self.completed != UNKNOWN:
                self._write_job(UNKNOWN)

    def _write_job(self, completed: int) -> None:
        self.completed = completed
        self._map[_JOB.place] = _JOB.pack(completed, max(self._start, 0))


class _Phase:
    """A phase that is followed by the loop.

    Its end does not restore the previous phase, which may never have ended because the step raised.
    """

    def __init__(self, box: BlackBox, number: int) -> None:
        self._box, self._number = box, number

    def __enter__(self) -> None:
        self._box.change(self._number)

    def __exit__(self, kind: object = None, *_: object) -> None:
        self._box.leave(LOOP, kind)


class _Forward(_Phase):
    def __enter__(self) -> None:
        self._box.forward_began(self._box.change(FORWARD))


class _Optimizer(_Phase):
    def __exit__(self, kind: object = None, *_: object) -> None:
        now = self._box.leave(LOOP, kind)
        if kind is None:
            self._box.optimizer_ended(now)


class _Meeting(_Phase):
    """A wait for other ranks, inside any phase."""

    def __init__(self, box: BlackBox, number: int) -> None:
        super().__init__(box, number)
        self._outer = LOOP
        self._began = 0.0
        self._depth = 0
        """Nesting depth; only the outermost wait counts."""

    def __enter__(self) -> None:
        self._depth += 1
        if self._depth > 1 or self._box.phase == BUCKET_WAIT:
            return
        self._outer = self._box.phase
        self._began = self._box.change(self._number)

    def __exit__(self, kind: object = None, *_: object) -> None:
        self._depth -= 1
        if self._depth or (self._box.phase == BUCKET_WAIT and self._number == COLLECTIVE):
            return
        now = self._box.leave(self._outer, kind)
        if self._outer not in (WAIT, OUTER_STEP):  # which add the whole wait
            self._box.add_wait(now - self._began)


class _BucketWait(_Phase):
    """The wait for one bucket, inside ``wait``, which continues after it."""

    def __enter__(self) -> None:
        self._box.change(BUCKET_WAIT, self._box.bucket)

    def __exit__(self, *_: object) -> None:
        self._box.phase = WAIT  # not written, because the next bucket or the end of the wait follows immediately


_KINDS = {FORWARD: _Forward, OPTIMIZER: _Optimizer, BUCKET_WAIT: _BucketWait}
_KINDS |= dict.fromkeys((WAIT, COLLECTIVE, OUTER_STEP), _Meeting)
"""Classes of the phases that are more than a :class:`_Phase`."""
WRITERS = (BlackBox, _Phase, _Forward, _Optimizer, _Meeting, _BucketWait)
"""Classes that run inside training steps."""


def open_box(environment: Mapping[str, str] = os.environ) -> BlackBox | None:
    """Open this process's black box; return None without a launcher, or if a running parent process uses the box."""
    folder = environment.get(FOLDER)
    if not folder or multiprocessing.parent_process() is not None:
        return None
    try:
        path = path_of(Path(folder), int(environment["LOCAL_RANK"]))
        holder = read_box(path)
        if holder is not None and holder.pid != os.getpid() and is_running(holder.pid):
            return None
        is_first_start = environment.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
        return BlackBox(path, int(environment["RANK"]), int(environment["WORLD_SIZE"]), is_first_start)
    except FileNotFoundError:  # the job has ended but this process has not
        return None
    except (OSError, ValueError, KeyError) as error:
        logger.warning("paceline top cannot show this process, because its black box cannot be opened: %r", error)
        return None
