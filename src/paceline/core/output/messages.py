"""Messages of a command to the person who started it, on stderr."""

from __future__ import annotations

import sys
from contextlib import suppress
from typing import Any


class Unfailing:
    """``sys.stderr`` as it is now, with a :meth:`write` that never raises.

    A job does not depend on its messages: stderr may be closed, on a full disk, or a pipe that nobody reads.
    """

    def __init__(self) -> None:
        self._stream = sys.stderr

    def write(self, text: str) -> int:
        """Write and flush the text, if that is possible."""
        with suppress(OSError, ValueError, AttributeError):  # ValueError: a closed file; AttributeError: there is none
            self._stream.write(text)
            self._stream.flush()
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def flush(self) -> None:
        """Do nothing, because every write is flushed."""


def end_echo() -> None:
    """Begin a new line on a terminal after Ctrl-C, which the terminal has shown as ``^C``."""
    stderr = Unfailing()
    with suppress(OSError, ValueError, AttributeError):
        if stderr.isatty():
            stderr.write("\n")


def say(text: str) -> None:
    """Print a message of the command or the launcher, in one write; a message that cannot be written is dropped."""
    Unfailing().write(f"{text}\n")
