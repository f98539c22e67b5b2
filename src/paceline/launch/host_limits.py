"""Limits of the host, compared with the needs of the ranks before any is started."""

from __future__ import annotations

import os
import resource

from paceline.comm.shm.arena import available_memory
from paceline.errors import UsageError

RANK_BYTES = 12 << 20
"""Least private memory of a rank: that of a forked one after ``init()``. A rank that trains needs 20 times as much."""

FILES, RANK_FILES = 24, 10
"""Files that the launcher opens: in total, and in addition for each rank. A rank opens fewer."""

FILE_BYTES = 2**20
"""Largest file that launcher and ranks write, apart from checkpoints. The C++ code of the store would otherwise retry
forever."""


def cores() -> int:
    """Return the number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def check_room(count: int) -> None:
    """Refuse a number of ranks that the available memory cannot hold."""
    try:
        available = available_memory()
    except OSError:  # not Linux
        return
    if count * RANK_BYTES > available:
        raise UsageError(
            f"--nproc={count}: the ranks need at least {count * RANK_BYTES / 2**30:.1f} GiB of memory, and "
            f"{available / 2**30:.1f} GiB are available; start fewer"
        )


def check_files(count: int) -> None:
    """Refuse limits on the number or size of files that are too low for the launcher of `count` ranks."""
    longest = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    if longest != resource.RLIM_INFINITY and longest < FILE_BYTES:
        raise UsageError(
            f"the limit on the size of a file is {longest:,} bytes, and the ranks write files of up to {FILE_BYTES:,}; "
            "raise it: ulimit -f unlimited"
        )
    limit, needed = resource.getrlimit(resource.RLIMIT_NOFILE)[0], FILES + RANK_FILES * count
    if limit != resource.RLIM_INFINITY and limit < needed:
        raise UsageError(
            f"the limit on open files is {limit}, and {count} ranks need about {needed}; raise it: "
            f"ulimit -n {max(1024, needed)}"
        )
