"""CPU time used by another process."""

from __future__ import annotations

import os
from pathlib import Path


def processor_seconds(pid: int) -> float:
    """Return the CPU seconds used by all threads of a process; 0 if it has ended."""
    try:
        # The second field, a program's name in parentheses, may itself contain spaces and parentheses.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        # User and system time are fields 14 and 15 in proc(5), and the first two fields are cut off here.
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return 0.0
