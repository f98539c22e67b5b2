"""Stacks of threads, and the user's code in them, for messages and warnings."""

from __future__ import annotations

import functools
import gc
import re
import sys
import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, TracebackType

_LIBRARIES = (sys.base_prefix + "/lib", str(Path(__file__).parents[1]), "<")
"""Path prefixes of files of Python and of this package, and of code without a file."""
_INSTALLED = re.compile(r"/(site|dist)-packages/")
_TYPED = ("<string>", "<stdin>")
"""User code without a file: ``python -c``, and lines typed into Python."""


def warn(message: str, category: type[Warning] = UserWarning, call: FrameType | None = None) -> None:
    """Warn at the user's line that led to `call`, by default to the caller, or at that line if there is none."""
    at = _users_frame(call or sys._getframe(1))
    registry = at.f_globals.setdefault("__warningregistry__", {})
    name = at.f_globals.get("__name__")
    warnings.warn_explicit(message, category, at.f_code.co_filename, at.f_lineno, name, registry)


def place_in(trace: TracebackType | None) -> str:
    """Return the user's line in the traceback of an exception, `` (file, line 7)``; empty if there is none."""
    frames = traceback.extract_tb(trace)
    index = _innermost([frame.filename for frame in frames])
    return "" if index is None else f" ({frames[index].filename}, line {frames[index].lineno})"


def users_line(call: FrameType) -> str:
    """Return the user's line that led to `call`, in the form of :func:`place_in`."""
    at = _users_frame(call)
    return f" ({at.f_code.co_filename}, line {at.f_lineno})"


def runs_users_code(stack: FrameType) -> bool:
    """Return whether `stack`, of any thread, contains the user's code, or code without a file such as a cell."""
    with readable_stacks():
        return any(
            is_users(file := frame.f_code.co_filename) or file[0] == "<" for frame, _ in traceback.walk_stack(stack)
        )


@functools.cache
def is_users(path: str | None) -> bool:
    """Return whether a file is the user's: not part of Python, an installed package or Paceline."""
    return path is not None and not path.startswith(_LIBRARIES) and _INSTALLED.search(path) is None


def _users_frame(call: FrameType) -> FrameType:
    """Return the user's frame that led to `call`; `call` itself if there is none."""
    with readable_stacks():  # `call` may be in another thread
        frames = [frame for frame, _ in traceback.walk_stack(call)][::-1]
    index = _innermost([frame.f_code.co_filename for frame in frames])
    return call if index is None else frames[index]


def _innermost(files: Sequence[str]) -> int | None:
    """Return the index of the last user file in a stack, or of the last installed file outside Python and Paceline."""
    for is_theirs in (is_users, _TYPED.__contains__, lambda file: not file.startswith(_LIBRARIES)):
        if indices := [index for index, file in enumerate(files) if is_theirs(file)]:
            return indices[-1]
    return None


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
