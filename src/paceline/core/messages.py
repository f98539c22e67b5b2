"""Numbers, times and sizes as text."""

from __future__ import annotations

import signal


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
