"""Compares the limits of the host with the needs of the launcher before any rank starts."""

from __future__ import annotations

import os
import resource

from paceline.errors import UsageError

FILES, RANK_FILES = 24, 10
"""Files that the launcher opens: a fixed number, plus a number per rank. A rank opens fewer."""

FILE_BYTES = 2**20
"""Size of the largest file that the launcher and the ranks write, apart from checkpoints. With a lower limit, the
store's C++ code would retry forever."""


def cores() -> int:
    """Return the number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def check_files(count: int) -> None:
    """Raise an error if the limit on open files or on file size is too low for a launcher of `count` ranks."""
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
