"""The load of a rank's host: how long the rank was ready to run and had no core, and who kept the cores busy."""

from __future__ import annotations

import os
import resource
import time
from contextlib import suppress
from pathlib import Path

from paceline.profiler.records.rank_file import RankRecord

PROC = Path("/proc")


class HostLoad:
    """Reads Linux's accounts of the thread that makes it. On other systems, nothing is known."""

    def __init__(self) -> None:
        self._schedstat: int | None = None
        """Open file with the times of this thread: it ran, it waited for a core; in nanoseconds."""
        with suppress(OSError):
            self._schedstat = os.open(PROC / "thread-self" / "schedstat", os.O_RDONLY | os.O_CLOEXEC)
        self._delayed = self._total_delay()
        self._began, self._busy, self._own = time.perf_counter(), busy_seconds(), own_seconds()
        self._switches = _involuntary()

    def delay(self) -> float:
        """Return the seconds since the last call in which this thread was ready to run and had no core."""
        before, self._delayed = self._delayed, self._total_delay()
        return self._delayed - before

    def close(self, record: RankRecord) -> None:
        """Note in `record` what the cores did since the beginning."""
        wall = max(1e-9, time.perf_counter() - self._began)
        if self._busy is not None and (busy := busy_seconds()) is not None:
            record.busy_cores = (busy - self._busy) / wall
        record.own_cores = (own_seconds() - self._own) / wall
        record.switches = (_involuntary() - self._switches) / wall
        self.abandon()

    def abandon(self) -> None:
        """Close the file."""
        if self._schedstat is not None:
            os.close(self._schedstat)
            self._schedstat = None

    def _total_delay(self) -> float:
        if self._schedstat is None:
            return 0.0
        try:
            return int(os.pread(self._schedstat, 100, 0).split()[1]) / 1e9
        except (OSError, ValueError, IndexError):
            return 0.0


def busy_seconds() -> float | None:
    """Return the seconds that the cores of this process have worked, for whomever; None where that is not known."""
    try:
        cores = {f"cpu{core}" for core in os.sched_getaffinity(0)}
        lines = [line.split() for line in (PROC / "stat").read_text().splitlines()]
        # The first three of proc(5): user, nice and system time. Idle time, and waiting for a disk, follow.
        ticks = sum(sum(map(int, line[1:4])) for line in lines if line and line[0] in cores)
        return ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, AttributeError):
        return None


def own_seconds() -> float:
    """Return the seconds of cores that this process and its children have taken, such as workers of a DataLoader."""
    ended = sum(
        usage.ru_utime + usage.ru_stime
        for usage in map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    )
    running = 0.0
    with suppress(OSError):
        for child in (PROC / "self" / "task" / str(os.getpid()) / "children").read_text().split():
            with suppress(OSError, ValueError, IndexError):
                fields = (PROC / child / "stat").read_text().rpartition(")")[2].split()
                # Its own user and system time, fields 14 and 15 of proc(5), of which the first two are cut off.
                running += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return ended + running


def _involuntary() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw
