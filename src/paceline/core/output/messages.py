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


def _write(text: str) -> None:
    """Write the text to stderr and flush, if possible; never raises, and never blocks for long.

    A job must not fail or hang if stderr is closed, on a full disk, or a pipe without a reader.
    """
    stream = sys.stderr
    with suppress(OSError, ValueError, AttributeError):  # ValueError: a closed file; AttributeError: there is none
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
    except (OSError, AttributeError):  # not a file, such as in a notebook
        return False
    return not poll.poll(MESSAGE_S * 1000)


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
    with suppress(OSError, ValueError, AttributeError):
        if sys.stderr.isatty():
            _write("\n")


def say(text: str) -> None:
    """Print a message of the command or the launcher, in one write; a message that cannot be written is dropped."""
    _write(f"{text}\n")
