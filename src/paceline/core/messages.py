"""Messages on stderr, and numbers, times and sizes as text."""

from __future__ import annotations

import os
import select
import signal
import sys
from contextlib import suppress
from typing import Any

MESSAGE_S = 1.0
"""Maximum time, in seconds, to wait until stderr accepts a message."""
_PIECE = 1024
"""Number of characters whose UTF-8 encoding fits into any pipe that poll() reports as writable."""


def say(text: str) -> None:
    """Print a message from the command or the launcher to stderr; it is dropped if it cannot be written."""
    _write(f"{text}\n")


def end_echo() -> None:
    """Start a new line after Ctrl-C, which a terminal shows as ``^C``."""
    with suppress(OSError, ValueError, AttributeError):
        if sys.stderr.isatty():
            _write("\n")


def drop_unwritten() -> None:
    """Discard text that stderr did not accept; otherwise it makes the interpreter exit with code 120."""
    with suppress(AttributeError):
        try:
            sys.stderr.flush()
        except (OSError, ValueError):
            with suppress(OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())


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


def counted(number: int | str, noun: str) -> str:
    """Return a number and its noun, in the singular or plural: ``1 rank``, ``2 ranks``, ``1.5 cores``."""
    return f"{number} {noun}{'' if str(number) == '1' else 's'}"


def with_article(noun: str) -> str:
    """Return a noun, such as a type's name, with its article: ``a list``, ``an int``."""
    return f"{'an' if noun[:1].lower() in 'aeio' else 'a'} {noun}"


def signal_name(number: int) -> str:
    """Return the name of a signal: ``SIGKILL``, ``SIGRTMIN+6``."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"SIGRTMIN{number - signal.SIGRTMIN:+d}"


def nbytes(size: float) -> str:
    """Format a number of bytes: ``512 B``, ``1.5 MiB``, ``117 MiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} {unit}" if unit == "B" or abs(size) >= 100 else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def duration(seconds: float) -> str:
    """Format a time in seconds: ``850 µs``, ``12.3 ms``, ``4.2 s``, ``3 min 5 s``, ``2 h 10 min``, ``3 days 4 h``."""
    if seconds < 1e-3:
        return f"{1e6 * seconds:.0f} µs"
    if seconds < 1:
        return f"{1e3 * seconds:.{1 if seconds < 0.1 else 0}f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes = int(seconds) // 60
    if minutes < 60:
        return f"{minutes} min {int(seconds) % 60} s"
    hours = minutes // 60
    return f"{hours} h {minutes % 60} min" if hours < 48 else f"{hours // 24} days {hours % 24} h"


def digits(value: float | None) -> str:
    """Format a number with three significant digits and at most four decimals. None gives an empty string."""
    if value is None:
        return ""
    # 99.95 is rounded to 100, which has three digits without decimals.
    places = next((places for places in range(4) if value >= 99.95 / 10**places), 4)
    return f"{value:,.{places}f}"
