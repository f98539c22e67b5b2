"""The black box: a small file in memory with a rank's current phase, which other processes can read at any time.

The launcher creates a file of :data:`SIZE` bytes for each of its ranks; see
:mod:`paceline.core.job_directory`. A rank maps the file and writes to it without a system call, so the last
entry survives SIGKILL. Areas, by offset:

    0     head     version, process, rank, world size, host: written once, its first bytes last
    256   phase    phase, bucket, start time
    320   step     number of steps, their durations and waiting times
    384   raised   the phase that an exception left, with its start and end
    448   job      the job's last completed step, and the first step of this start
    512   free     zeros, reserved for new areas; readers ignore areas that they do not know

To show another number in ``paceline top``, append it to :data:`STEP` and :class:`Snapshot`, write it in
``black_box_writer.py``, and read it in ``tools/top.py``.

Each number is written atomically, but a reader may see an area during a write. A displayed time can then be wrong.

Times are seconds of ``time.monotonic()``, one clock for all processes of a host. They are measured on the host: on a
GPU, a rank waits for others in its stream, which the host does not see.
"""

from __future__ import annotations

import math
import mmap
import os
import struct
from dataclasses import dataclass
from pathlib import Path

FOLDER = "PACELINE_BLACK_BOX"
"""Environment variable with the folder of the black boxes, set by our launcher."""
SIZE = 4096
VERSION = 2
MAGIC = int.from_bytes(b"PACELINE", "little")
HEAD = struct.Struct("<QIIIIQ200s")  # magic, version, rank, world size, unused, process, host
# Native alignment, so that one instruction writes a number.
PHASE, PHASE_AT = struct.Struct("iid"), 256  # phase, bucket, since
STEP, STEP_AT = struct.Struct("Qdddddd"), 320  # steps, end, last, mean, waited, mean waited, its variance
RAISED, RAISED_AT = struct.Struct("iidd"), 384  # phase, bucket, since, until
JOB, JOB_AT = struct.Struct("qq"), 448  # completed, first
UNKNOWN = -1
"""Value for an unknown step of the job."""
PHASES = ("loop", "data wait", "forward", "backward", "wait", "bucket wait", "optimizer", "checkpoint", "collective")
"""Phases of a rank; a record holds the index. ``loop`` is everything between the others."""
WAITING = frozenset(("wait", "bucket wait", "collective"))
"""Phases that wait for other ranks or their data."""
WEIGHT = 0.1
"""Weight of the last step in moving averages."""


@dataclass(frozen=True)
class Raised:
    """The innermost phase that the latest exception left."""

    phase: str
    bucket: int | None
    since: float
    until: float
    """End of the outermost phase that the exception has left."""


@dataclass(frozen=True)
class Snapshot:
    """The state of a rank at one moment: its step, its phase, and how long it has waited."""

    pid: int
    rank: int
    size: int
    """World size."""
    host: str
    phase: str
    """One of :data:`PHASES`."""
    since: float
    """Start of the phase by ``time.monotonic``, the clock of all times here."""
    bucket: int | None
    """Bucket that the rank waits for, in ``bucket wait``."""
    steps: int
    """Number of steps that this process has timed, from a forward of Paceline's wrapper to the end of an optimizer
    step."""
    stepped: float
    """End of the last timed step; 0.0 before the first."""
    step: float
    """Seconds of the last step."""
    mean_step: float
    """Moving average of the seconds per step, without the first (warm-up) step; 0.0 before the second."""
    waited: float
    """Seconds that the last step spent in :data:`WAITING` phases."""
    mean_waited: float
    """Moving average of the seconds waited per step, without the first step."""
    waited_spread: float
    """Moving standard deviation of the seconds waited per step."""
    raised: Raised | None = None
    """Phase that an exception has left, unless another phase has begun since."""
    completed: int | None = None
    """Last completed step of the job, including earlier starts; None if unknown."""
    has_stepped: bool = False
    """Whether this process has completed a step."""


def path_of(folder: Path, local_rank: int) -> Path:
    """Return the path of the file of the rank with this local rank."""
    return folder / f"rank-{local_rank}"


def read_box(path: Path) -> Snapshot | None:
    """Return the rank's record now; None if no rank has opened it yet."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        with mmap.mmap(descriptor, SIZE, access=mmap.ACCESS_READ) as memory:
            return _decode(memory, path)
    finally:
        os.close(descriptor)


def snapshot_of(folder: Path, local_rank: int) -> Snapshot | None:
    """Return the record of a rank now; None if there is none yet, or if it is missing or damaged."""
    try:
        return read_box(path_of(folder, local_rank))
    except (OSError, ValueError):
        return None


def _decode(memory: mmap.mmap, path: Path) -> Snapshot | None:
    magic, version, rank, size, _, pid, host = HEAD.unpack_from(memory)
    if magic != MAGIC:
        return None
    if version != VERSION:
        raise ValueError(f"the black box {path} has version {version}, but this Paceline reads version {VERSION}")
    phase, bucket, since = PHASE.unpack_from(memory, PHASE_AT)
    steps, stepped, step, mean, waited, mean_waited, variance = STEP.unpack_from(memory, STEP_AT)
    raised_in, raised_bucket, began, until = RAISED.unpack_from(memory, RAISED_AT)
    completed, first = JOB.unpack_from(memory, JOB_AT)
    return Snapshot(
        pid,
        rank,
        size,
        host.rstrip(b"\0").decode(errors="replace"),
        _name(phase),
        since,
        _bucket(bucket),
        steps,
        stepped,
        step,
        mean,
        waited,
        mean_waited,
        math.sqrt(max(variance, 0.0)),
        Raised(_name(raised_in), _bucket(raised_bucket), began, until) if until == since else None,
        None if completed == UNKNOWN else completed,
        steps > 0 or completed > first,
    )


def _name(phase: int) -> str:
    return PHASES[phase] if 0 <= phase < len(PHASES) else f"phase {phase}"


def _bucket(number: int) -> int | None:
    return number if number >= 0 else None
