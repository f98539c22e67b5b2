"""Messages that commands print to stderr."""

from __future__ import annotations

import os
import select
import sys
from contextlib import suppress
from typing import Any

MESSAGE_S = 1.0
"""Maximum time, in seconds, to wait until stderr accepts a message."""
_PIECE = 1024
"""Number of characters whose UTF-8 encoding fits into any pipe that poll() reports as writable."""


def _write(text: str) -> None:
    """Write the text to stderr and flush, if possible. Never raises, and never blocks for long.

    A closed stderr, a full disk or a pipe without a reader must not make a job fail or hang.
    """
    stream = sys.stderr
    with suppress(OSError, ValueError, AttributeError):  # ValueError: stderr is closed; AttributeError: it is None
        for begin in range(0, len(text), _PIECE):
            if _is_stuck(stream):
                break
            stream.write(text[begin : begin + _PIECE])
            stream.flush()


def _is_stuck(stream: Any) -> bool:
    """Return whether a write would block, because a pipe is full or a terminal is stopped."""
    poll = select.poll()
    try:
        poll.register(stream.fileno(), select.POLLOUT)
    except (OSError, AttributeError):  # stderr is not a real file, for example in a notebook
        return False
    return not poll.poll(MESSAGE_S * 1000)


def drop_unwritten() -> None:
    """Discard text that stderr did not accept; otherwise it makes the interpreter exit with code 120."""
    with suppress(AttributeError):
        try:
            sys.stderr.flush()
        except (OSError, ValueError):
            with suppress(OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())


def end_echo() -> None:
    """Start a new line after Ctrl-C, which a terminal shows as ``^C``."""
    with suppress(OSError, ValueError, AttributeError):
        if sys.stderr.isatty():
            _write("\n")


def say(text: str) -> None:
    """Print a message from the command or the launcher to stderr; it is dropped if it cannot be written."""
    _write(f"{text}\n")
