"""Load on a host's cores, and the delays of a rank's thread."""

from __future__ import annotations

import gc
import math
import os
import resource
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from paceline.core.host import processor_seconds
from paceline.core.messages import counted
from paceline.core.spans import COLLECTOR, Span, recorder
from paceline.profiler.rank_file import RankRecord

DELAYED, OTHERS = 0.1, 0.2
"""Load is named as a cause if a rank had no core for at least this share of its time, and at least this many cores were
busy with other programs."""
PROC = Path("/proc")
MOUNT, OWN = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
"""Mount point of the control groups, and the file that names the groups of this process."""


@dataclass(frozen=True)
class Neighbours:
    """Ranks that share cores."""

    records: Sequence[RankRecord]
    cores: float
    """Number of cores that they share, limited by the quota of a control group."""

    @property
    def threads(self) -> int:
        """Total number of their threads."""
        return sum(record.threads for record in self.records)

    @property
    def is_crowded(self) -> bool:
        """Whether they have more threads than cores."""
        return self.threads > self.cores

    def description(self) -> str:
        """Return the numbers of ranks, threads and cores in words."""
        counts = " and ".join(map(str, sorted({record.threads for record in self.records})))
        threads, cores = counted(counts, "thread"), counted(f"{self.cores:g}", "core")
        if len(self.records) == 1:
            return f"a rank with {threads} has {cores}"
        return f"{len(self.records)} ranks with {threads} each share {cores}"


@dataclass(frozen=True)
class Load:
    """The load on the cores of the most delayed rank."""

    share: float
    """Share of its time during which the rank was ready to run but had no core."""
    rank: int
    others: float
    """How many of the rank's cores were busy with programs other than the ranks and their workers."""
    rivals: float
    """How many of the rank's cores were busy with other threads of the ranks and their workers."""
    neighbours: Neighbours

    @property
    def of_ranks(self) -> float:
        """Share of its time without a core because the ranks have more threads than cores."""
        if not (self.neighbours.is_crowded and self.rivals):
            return 0.0
        return self.share * self.rivals / (self.rivals + self.others)

    @property
    def of_others(self) -> float:
        """Share of its time without a core because of other programs."""
        return self.share - self.of_ranks

    @property
    def is_by_others(self) -> bool:
        """Whether other programs slow down the run."""
        return self.of_others >= DELAYED and self.others >= OTHERS

    @property
    def is_by_ranks(self) -> bool:
        """Whether the ranks slow each other down because they have more threads than cores."""
        return self.of_ranks >= DELAYED


def neighbours(records: Sequence[RankRecord], rank: int) -> Neighbours:
    """Return the ranks that share cores with `rank`, including `rank` itself, and those cores."""
    this = records[rank]
    sharing = [
        record
        for record in records
        if record.host == this.host
        # If their cores are unknown, assume that all ranks on a host share all of its cores.
        and (not record.core_numbers or not this.core_numbers or set(record.core_numbers) & set(this.core_numbers))
    ]
    numbers = {number for record in sharing for number in record.core_numbers}
    cores = float(len(numbers) or this.cores)
    return Neighbours(sharing, cores if this.quota is None else min(cores, this.quota))


def load_of(records: Sequence[RankRecord], delays: Sequence[float]) -> Load | None:
    """Return the load on the cores of the rank with the largest delay; None if unknown.

    Args:
        records: records of all ranks.
        delays: for each rank, the share of its time during which it was ready to run but had no core.
    """
    rank = max(range(len(records)), key=lambda place: delays[place])
    record, group = records[rank], neighbours(records, rank)
    if record.busy_cores is None:
        return None
    own_cores = math.fsum(member.own_cores for member in group.records)
    # The loop's thread does not compete with itself, but the threads of its operators compete with it.
    rivals = max(0.0, own_cores - record.loop_cores)
    return Load(delays[rank], rank, max(0.0, record.busy_cores - own_cores), rivals, group)


class HostLoad:
    """Linux scheduler statistics of the thread that creates the object. All zeros on other systems."""

    def __init__(self) -> None:
        self._schedstat: int | None = None
        """Open file that contains how many nanoseconds this thread ran and how many it waited for a core."""
        # thread-self refers to the thread that opens it. Another thread may close the record, so keep the file open.
        with suppress(OSError):
            self._schedstat = os.open(PROC / "thread-self" / "schedstat", os.O_RDONLY | os.O_CLOEXEC)
        self._ran, self._delayed = self._times()
        self._at_start = self._ran
        self._began, self._busy, self._own = time.perf_counter(), busy_seconds(), own_seconds()
        self._switches = switches()

    def delay(self) -> float:
        """Return how many seconds since the last call this thread was ready to run but had no core."""
        previous = self._delayed
        self._ran, self._delayed = self._times()
        return self._delayed - previous

    def close(self, record: RankRecord) -> None:
        """Add the core use since the start to `record`."""
        wall = max(1e-9, time.perf_counter() - self._began)
        if self._busy is not None and (busy := busy_seconds()) is not None:
            record.busy_cores = (busy - self._busy) / wall
        record.own_cores = (own_seconds() - self._own) / wall
        record.switches = (switches() - self._switches) / wall
        # Count only up to the last step, because a thread other than the loop's may close the record. Cap at one core,
        # because the kernel updates a thread's times only every few milliseconds.
        record.loop_cores = min(1.0, (self._ran - self._at_start) / wall)
        record.core_numbers, record.quota = core_numbers(), quota()
        self.abandon()

    def abandon(self) -> None:
        """Close the file."""
        if self._schedstat is not None:
            os.close(self._schedstat)
            self._schedstat = None

    def _times(self) -> tuple[float, float]:
        """Return how many seconds this thread ran, and how many it waited for a core."""
        if self._schedstat is None:
            return 0.0, 0.0
        try:
            ran, waited = os.pread(self._schedstat, 100, 0).split()[:2]
            return int(ran) / 1e9, int(waited) / 1e9
        except (OSError, ValueError):
            return 0.0, 0.0


class CollectorPauses:
    """Records a span for each run of Python's garbage collector in the thread of the loop.

    To be called by ``gc``. Runs do not nest.
    """

    def __init__(self) -> None:
        self.collected = 0
        """Number of objects freed since the last step ended."""
        self._began: tuple[float, Any] | None = None
        """Time and device event of the current run's start."""
        self._thread = threading.get_ident()

    def __call__(self, phase: str, info: dict[str, int]) -> None:
        if threading.get_ident() != self._thread:  # its span would not be inside the spans of the loop
            return
        # While a CUDA graph is captured, the events would become part of it.
        if recorder.make_event is not None and torch.cuda.is_current_stream_capturing():
            return
        now, event = time.perf_counter(), None if recorder.make_event is None else recorder.make_event()
        if phase == "start":
            self._began = now, event
        elif recorder.on and self._began is not None:
            (began, before), self._began = self._began, None
            self.collected += info["collected"]
            recorder.spans.append(Span(COLLECTOR, began, now, events=event and (before, event)))

    def detach(self) -> None:
        """Stop recording."""
        with suppress(ValueError):  # the program may have removed all callbacks
            gc.callbacks.remove(self)


def core_numbers() -> list[int]:
    """Return the numbers of the cores that this process may use; empty if unknown."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []


def quota(mount: Path = MOUNT, membership: Path = OWN) -> float | None:
    """Return the limit that control groups (version 2) set, in cores; None without a limit."""
    limits = []
    with suppress(OSError):
        for line in membership.read_text().splitlines():
            if line.startswith("0::"):
                # A container often sees its group at the mount point but reads the path on the host, which may not
                # exist here.
                group = mount / line.removeprefix("0::").lstrip("/")
                # The limits of its parent groups also apply to a group.
                limits += [limit for around in (group, *group.parents) for limit in _limits(around)]
    return min(limits, default=None)


def _limits(group: Path) -> list[float]:
    """Return the limit of one control group in cores, if it has one."""
    with suppress(OSError, ValueError):
        time_, period = (group / "cpu.max").read_text().split()
        return [int(time_) / int(period)]  # "max" is not a number
    return []


def busy_seconds() -> float | None:
    """Return the seconds that this process's cores have been busy, for any process; None if unknown."""
    try:
        cores = {f"cpu{core}" for core in os.sched_getaffinity(0)}
        lines = [line.split() for line in (PROC / "stat").read_text().splitlines()]
        # The first three fields, see proc(5), are user, nice and system time. Idle time and I/O wait follow.
        ticks = sum(sum(map(int, line[1:4])) for line in lines if line and line[0] in cores)
        return ticks / os.sysconf("SC_CLK_TCK")
    # AttributeError if os has no sched_getaffinity, as on macOS.
    except (OSError, ValueError, AttributeError):
        return None


def switches() -> int:
    """Return the number of context switches of this process's threads."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_nvcsw + usage.ru_nivcsw


def own_seconds() -> float:
    """Return the core seconds of this process and its children, such as workers of a DataLoader."""
    ended = sum(os.times()[:4])
    # os.times() counts only children that have ended, but a loader's workers are still running.
    running = 0.0
    # Children are listed under the thread that started them. Kernels may lack these lists (CONFIG_PROC_CHILDREN).
    for children in (PROC / "self" / "task").glob("*/children"):
        # The thread may have ended in the meantime.
        with suppress(OSError):
            running += sum(processor_seconds(int(child)) for child in children.read_text().split())
    return ended + running
