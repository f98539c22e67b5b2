"""Finds out from a rank's stack whether it waits for other ranks, and in which call of a cell."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from paceline.launch.watching.stack_requests import ENGINE, PLACE, waiting_frames

_CELL = re.compile(r"<ipython-input-(\d+)-")
# Functions that torch puts around others: the one inside them is what a user knows.
_WRAPPERS = {"wrapper", "decorate_context", "__call__", "_wrapped_call_impl", "_call_impl"}


@dataclass(frozen=True)
class Wait:
    """A call in which a rank waits for others."""

    call: str
    """Function that the cell has called."""
    place: str
    """Cell and line; empty if the call is elsewhere."""
    is_sure: bool = True
    """Whether the stack proves it. A backward computes or waits in C++, and only the processor time tells which."""

    def __str__(self) -> str:
        return f"{self.call}() ({self.place})" if self.place else f"{self.call}()"


def wait_in(stacks: str) -> Wait | None:
    """Return the call in which a rank with these stacks waits for others; None if it does something else."""
    frames = waiting_frames(stacks, also="/paceline/ddp/")
    if not frames:
        return None
    is_sure, call = ENGINE.search(frames[0]) is None, ""
    for frame in filter(None, map(PLACE.search, frames)):
        file, line, function = frame.groups()
        if cell := _CELL.match(file):
            return Wait(call, f"In[{cell[1]}], line {line}", is_sure)
        if "/paceline/tools/notebook/" in file:
            break
        call = call if function in _WRAPPERS and call else function
    return Wait(call, "", is_sure)


def processor_seconds(pid: int) -> float:
    """Return the processor time of the process so far, in all of its threads."""
    try:
        # Behind the last parenthesis, because the program's name in parentheses may hold some, and spaces.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
