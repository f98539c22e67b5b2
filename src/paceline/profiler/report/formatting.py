"""Times, shares and sentences as text."""

from __future__ import annotations


def ms(seconds: float) -> str:
    """Return a time as text, with three digits: ``12.3 ms``; from ten seconds on, ``12.3 s``."""
    value = 1e3 * seconds
    if value == 0 or abs(value) >= 10_000:
        return "0 ms" if value == 0 else f"{seconds:,.1f} s"
    return f"{value:,.0f} ms" if abs(value) >= 100 else f"{value:.1f} ms" if abs(value) >= 1 else f"{value:.2f} ms"


def percent(share: float) -> str:
    """Return a share as text: ``27%``; below ten percent with one more digit."""
    # From 0.0995 on, a share rounds to 10%.
    return f"{100 * share:.0f}%" if abs(share) >= 0.0995 else f"{100 * share:.1f}%"


def sentence(words: str) -> str:
    """Return `words` with a period, and capitalized unless they start with an identifier."""
    first = words.split(" ", 1)[0]
    # Do not capitalize an identifier such as bucket_cap_mb=5.
    if first.isalpha() and first.islower():
        words = words[:1].upper() + words[1:]
    return words if words.endswith((".", "!", "?", ":")) or not words else f"{words}."


def kind_name(kind: str) -> str:
    """Return the kind of a piece of advice as a heading: ``Data loading`` for ``data-loading``."""
    return kind.replace("-", " ").capitalize()
