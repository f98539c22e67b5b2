"""Tells from a rank's stack whether it waits for other ranks, and in which call of a cell."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from paceline.launch.watching.stack_requests import main_thread

_FRAME = re.compile(r'File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.+)')
_COMMUNICATION = ("/torch/distributed/", "/paceline/comm/", "/paceline/ddp/", "/paceline/core/processes/")
_BACKWARD = "/torch/autograd/graph.py"
_CELL = re.compile(r"<ipython-input-(\d+)-")
_STANDARD = re.compile(r"/lib/python3[^/]*/(?!site-packages/)")
_WRAPPERS = {"wrapper", "decorate_context", "__call__", "_wrapped_call_impl", "_call_impl"}


@dataclass(frozen=True)
class Wait:
    """A call in which a rank waits for others."""

    call: str
    """The function that the cell has called."""
    place: str
    """The cell and its line; empty if the call is elsewhere."""
    is_sure: bool = True
    """False in a backward, which computes or waits in C++; one that waits uses no processor."""

    def __str__(self) -> str:
        return f"{self.call}() ({self.place})" if self.place else f"{self.call}()"


def wait_in(stacks: str) -> Wait | None:
    """Return the call in which a rank with these stacks waits for others; None if it does something else."""
    frames = [match for text in main_thread(stacks) if (match := _FRAME.match(text))]
    inner = [frame for frame in frames if not _STANDARD.search(frame["file"])]
    if not inner or not any(part in inner[0]["file"] for part in (*_COMMUNICATION, _BACKWARD)):
        return None
    is_sure = _BACKWARD not in inner[0]["file"]
    call = ""
    for frame in inner:
        if cell := _CELL.match(frame["file"]):
            return Wait(call, f"In[{cell[1]}], line {frame['line']}", is_sure)
        if "/paceline/tools/notebook/" in frame["file"]:
            break
        call = call if frame["function"] in _WRAPPERS and call else frame["function"]
    return Wait(call, "", is_sure)


def processor_seconds(pid: int) -> float:
    """Return how long the process has computed so far, in all of its threads."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
