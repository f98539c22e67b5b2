"""Three clocks for work of microseconds: wall, CPU time of the calling thread, and CPU time of the process.

Where cores are shared with other work, the thread's is the steadiest.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

CLOCKS: dict[str, Callable[[], int]] = {
    "wall": time.perf_counter_ns,
    "thread": time.thread_time_ns,
    "process": time.process_time_ns,
}
Clocks = dict[str, float]
"""Seconds by clock."""


def now() -> list[int]:
    """Read all clocks, in nanoseconds."""
    return [clock() for clock in CLOCKS.values()]


def between(began: Sequence[int], ended: Sequence[int]) -> list[int]:
    """Return the nanoseconds between two looks."""
    return [end - begin for begin, end in zip(began, ended, strict=True)]


def medians(nanoseconds: Sequence[Sequence[int]]) -> Clocks:
    """Return the median seconds of several stretches, by clock."""
    columns = zip(*nanoseconds, strict=True)
    return {name: 1e-9 * statistics.median(column) for name, column in zip(CLOCKS, columns, strict=True)}


@contextmanager
def without_collections() -> Iterator[None]:
    """Keep the garbage collector out of the block, as its pauses would fall into one variant or another."""
    gc.disable()
    yield
    gc.enable()
    gc.collect()
