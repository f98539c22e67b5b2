"""Limits of the host, compared with the needs of the ranks before any is started."""

from __future__ import annotations

import resource

from paceline.comm.shm.arena import available_memory
from paceline.errors import UsageError

RANK_BYTES = 150 << 20
"""Memory to expect per rank. Private memory measured on a CPU: 145 MiB after ``init()`` if it has imported torch,
12 MiB if it is forked; but 264 MiB while the digits recipe trains, also forked."""

FILES, RANK_FILES = 24, 10
"""Open files that the launcher needs in total, and in addition for each rank; a rank needs fewer."""

FILE_BYTES = 2**20
"""Largest file that launcher and ranks may have to write, but for checkpoints: black boxes, records, and the memory
file in which ranks meet, whose C++ code waits for ever where it cannot write."""


def check_room(count: int) -> None:
    """Check that the available memory can hold `count` ranks, before they push everything else out of it."""
    try:
        available = available_memory()
    except OSError:  # not Linux
        return
    if count * RANK_BYTES > available:
        raise UsageError(
            f"--nproc={count}: {count} ranks need about {count * RANK_BYTES / 2**30:.1f} GiB of memory "
            f"({RANK_BYTES >> 20} MiB each, without large models), and {available / 2**30:.1f} GiB are available; "
            f"start at most {max(1, available // RANK_BYTES)}, or give --force"
        )


def check_files(count: int) -> None:
    """Check that the launcher of `count` ranks may open enough files, and write files that are large enough."""
    longest = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    if longest != resource.RLIM_INFINITY and longest < FILE_BYTES:
        raise UsageError(
            f"a file may have {longest:,} bytes here, and the ranks need some of up to {FILE_BYTES:,}; raise the limit "
            "first: ulimit -f unlimited"
        )
    limit, needed = resource.getrlimit(resource.RLIMIT_NOFILE)[0], FILES + RANK_FILES * count
    if limit != resource.RLIM_INFINITY and limit < needed:
        raise UsageError(
            f"a process may open {limit} files here, and {count} ranks need about {needed}; raise the limit first: "
            f"ulimit -n {max(1024, needed)}"
        )
