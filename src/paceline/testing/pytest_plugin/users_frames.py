"""Shortens the traceback of a rank's exception to the user's frames."""

from __future__ import annotations

import itertools
import traceback
from collections.abc import Iterator
from types import TracebackType

import pytest

from paceline.core.telemetry.users_code import is_users
from paceline.errors import PacelineError


def keep_users_frames(config: pytest.Config, error: BaseException) -> str:
    """Keep only the user's frames in `error`. If a library raised it, return the library's frames in short form."""
    entries = [*_entries(error)]
    users, options = [entry for entry in entries if is_users(entry.tb_frame.f_code.co_filename)], config.option
    if not users or users[-1] is entries[-1] or options.usepdb or options.fulltrace or options.tbstyle == "native":
        return ""
    lines = _library_frames(error)
    if isinstance(error, PacelineError):  # its message includes the cause, so show the chained error in short
        if error.__cause__ is not None:
            lines += [first_line(f"{type(error.__cause__).__name__}: {error.__cause__}")]
            lines += _library_frames(error.__cause__)
        error.__cause__, error.__suppress_context__ = None, True
    trimmed = None
    for entry in reversed(users):
        trimmed = TracebackType(trimmed, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    error.__traceback__ = trimmed
    return "\n".join(lines)


def _entries(error: BaseException) -> Iterator[TracebackType]:
    entry = error.__traceback__
    while entry is not None:
        yield entry
        entry = entry.tb_next


def _library_frames(error: BaseException) -> list[str]:
    """Return the frames that the user's innermost frame called, innermost first."""
    frames = traceback.extract_tb(error.__traceback__)
    inner = itertools.takewhile(lambda frame: not is_users(frame.filename), reversed(frames))
    return [f"{frame.filename}:{frame.lineno} in {frame.name}" for frame in inner]


def first_line(text: str) -> str:
    """Return the first line that is not blank; an empty string if there is none."""
    return next((line for line in text.splitlines() if line.strip()), "")
