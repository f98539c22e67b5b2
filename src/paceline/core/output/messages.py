"""Messages of commands on stderr."""

from __future__ import annotations

import os
import select
import sys
from contextlib import suppress
from typing import Any

MESSAGE_S = 1.0
"""How long a message may wait for a reader."""
_PIECE = 1024
"""Characters that fit into a pipe that poll() calls writable, as UTF-8."""


class _Unfailing:
    """The current ``sys.stderr``, with a :meth:`write` that never raises and never blocks for long.

    A job must not fail or hang if stderr is closed, on a full disk, or a pipe without a reader.
    """

    def __init__(self) -> None:
        self._stream = sys.stderr

    def write(self, text: str) -> int:
        """Write and flush the text, if that is possible."""
        with suppress(OSError, ValueError, AttributeError):  # ValueError: a closed file; AttributeError: there is none
            for begin in range(0, len(text), _PIECE):
                if self._is_stuck():
                    break
                self._stream.write(text[begin : begin + _PIECE])
                self._stream.flush()
        return len(text)

    def _is_stuck(self) -> bool:
        """Return whether a write would block, because a pipe is full or a terminal is stopped."""
        poll = select.poll()
        try:
            poll.register(self._stream.fileno(), select.POLLOUT)
        except (OSError, AttributeError):  # not a file, such as in a notebook
            return False
        return not poll.poll(MESSAGE_S * 1000)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def flush(self) -> None:
        """Return at once, because every write is flushed."""


def drop_unwritten() -> None:
    """Drop text that stderr did not take; otherwise the interpreter ends with exit code 120 because of it."""
    with suppress(AttributeError):
        try:
            sys.stderr.flush()
        except (OSError, ValueError):
            with suppress(OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())


def end_echo() -> None:
    """Begin a new line on a terminal after Ctrl-C, which the terminal has shown as ``^C``."""
    stderr = _Unfailing()
    with suppress(OSError, ValueError, AttributeError):
        if stderr.isatty():
            stderr.write("\n")


def say(text: str) -> None:
    """Print a message of the command or the launcher, in one write; a message that cannot be written is dropped."""
    _Unfailing().write(f"{text}\n")
