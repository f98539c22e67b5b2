"""This host: the status of its processes, and the limits that a job must fit before any rank starts."""

from __future__ import annotations

import math
import os
import re
import resource
from pathlib import Path

from paceline.core.failure_callbacks import with_causes
from paceline.errors import UsageError

FILES, RANK_FILES = 24, 10
"""Files that the launcher opens: a fixed number, plus a number per rank. A rank opens fewer."""
FILE_BYTES = 2**20
"""Size of the largest file that the launcher and the ranks write, apart from checkpoints. With a lower limit, the
store's C++ code would retry forever."""


def process_state(pid: int) -> str:
    """Return the letter of the process's state, such as T for stopped; empty if it is not known."""
    return "".join(_fields(pid)[:1])


def is_running(pid: int) -> bool:
    """Return whether the process exists and has not ended; a zombie has ended."""
    state = process_state(pid)
    if state or Path("/proc/self/stat").exists():
        return bool(state) and state not in "ZX"
    try:
        os.kill(pid, 0)
    except OSError as error:
        return isinstance(error, PermissionError)
    return True


def handles(pid: int, number: int) -> bool:
    """Return whether the process handles the signal `number`; False if unknown."""
    caught = next((line.split()[1] for line in _read(pid, "status").splitlines() if line.startswith("SigCgt:")), "0")
    return bool(int(caught, 16) >> (number - 1) & 1)


def context_switches(pid: int) -> int:
    """Return the number of context switches of a process's main thread; 0 if unknown."""
    return sum(int(line.split()[1]) for line in _read(pid, "status").splitlines() if "ctxt_switches:" in line)


def processor_seconds(pid: int) -> float:
    """Return the CPU seconds used by all threads of a process; 0 if it has ended."""
    fields = _fields(pid)
    # User and system time are fields 14 and 15 in proc(5), and the first two fields are cut off here.
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK") if fields else 0.0


def busy_seconds(pid: int) -> float:
    """Return the seconds that all threads of a process used a core or, if they still exist, waited for one.

    Infinity if unknown.
    """
    threads = Path(f"/proc/{pid}/task").glob("*")
    delays = [int(times.split()[1]) for thread in threads if (times := _read(pid, f"task/{thread.name}/schedstat"))]
    return processor_seconds(pid) + sum(delays) / 1e9 if delays else math.inf


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


def _fields(pid: int) -> list[str]:
    """Return the fields of the process's ``stat`` file from the third on; none if it has ended."""
    # The second field, a program's name in parentheses, may itself contain spaces and parentheses.
    return _read(pid, "stat").rpartition(")")[2].split()


def _read(pid: int, name: str) -> str:
    """Return the text of a file in ``/proc/<pid>``; empty if the process has ended, or without ``/proc``."""
    try:
        return Path(f"/proc/{pid}/{name}").read_text(errors="replace")  # a program may have any name
    except OSError:
        return ""
