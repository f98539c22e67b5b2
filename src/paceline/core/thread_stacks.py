"""Reads the stacks of other threads."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def readable_stacks() -> Iterator[None]:
    """Keep the frames of ``sys._current_frames()`` valid: in Python 3.11, pause the garbage collector.

    In that version, ``f_back`` creates the frame that it returns. If this starts a collection whose callbacks release
    the GIL, the other thread may return from the function meanwhile, and the frame then refers to reused memory.

    If two threads read stacks at the same time, the pause ends when the first is done, even if the second is still
    reading. This is rare, because a thread normally reads a stack in less time than it may keep the GIL.
    """
    pauses = sys.version_info[:2] == (3, 11) and gc.isenabled()
    if pauses:
        gc.disable()
    try:
        yield
    finally:
        if pauses:
            gc.enable()
