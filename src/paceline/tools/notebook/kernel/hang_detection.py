"""Recognizes, from the stack of a rank, calls that wait for other ranks."""

from __future__ import annotations

import re
from dataclasses import dataclass

from paceline.launch.watching.stack_requests import ENGINE, PLACE, waiting_frames

_CELL = re.compile(r"<ipython-input-(\d+)-")
_WRAPPER = "/paceline/ddp/"
# Wrapper functions of torch, which are not reported; users know the wrapped function.
_WRAPPERS = {"wrapper", "decorate_context", "__call__", "_wrapped_call_impl", "_call_impl"}


@dataclass(frozen=True)
class Wait:
    """A call that waits for other ranks."""

    call: str
    """Name of the function that the cell called."""
    place: str
    """Cell and line; empty if the call is not in a cell."""
    is_sure: bool = True
    """Whether the stack alone is proof. Backward, and the wrapper's own code, may also be computing; a rank that waits
    in them is asleep."""

    def __str__(self) -> str:
        return f"{self.call}() ({self.place})" if self.place else f"{self.call}()"


def wait_in(stacks: str) -> Wait | None:
    """Return the call that waits for other ranks, or None if these stacks show no such call."""
    frames = waiting_frames(stacks, also=_WRAPPER)
    if not frames:
        return None
    is_sure, call = ENGINE.search(frames[0]) is None and _WRAPPER not in frames[0], ""
    for frame in filter(None, map(PLACE.search, frames)):
        file, line, function = frame.groups()
        if cell := _CELL.match(file):
            return Wait(call, f"In[{cell[1]}], line {line}", is_sure)
        if "/paceline/tools/notebook/" in file:
            break
        call = call if function in _WRAPPERS and call else function
    return Wait(call, "", is_sure)
