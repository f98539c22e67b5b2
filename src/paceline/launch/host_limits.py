"""Compares the limits of the host with the needs of the launcher before any rank starts."""

from __future__ import annotations

import os
import re
import resource

from paceline.core.telemetry.failure_callbacks import with_causes
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


def reached(error: BaseException) -> str | None:
    """Return which limit of the host `error` or its cause has reached, and the remedy; None if it is another error."""
    text = "\n".join(map(str, with_causes(error)))
    files, processes = (resource.getrlimit(kind)[0] for kind in (resource.RLIMIT_NOFILE, resource.RLIMIT_NPROC))
    if "Too many open files" in text:
        return f"the limit on open files, {files}, is reached; raise it: ulimit -n {max(1024, 2 * files)}"
    if re.search("start new thread|Resource temporarily unavailable", text):
        return (
            f"no process or thread can be started; raise the limit of the user (ulimit -u, now {processes}) or of the "
            "control group (pids.max), or start fewer ranks"
        )
    return "no temporary folder can be written to; name one in TMPDIR" if "No usable temporary" in text else None
