"""The status of other processes, from Linux's ``/proc``."""

from __future__ import annotations

import math
import os
from pathlib import Path


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
