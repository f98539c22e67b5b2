"""Lengths of sets of time intervals. An interval is a pair of start and end."""

from __future__ import annotations

from collections.abc import Iterable

Interval = tuple[float, float]


def merged(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the union as sorted intervals that neither overlap nor touch."""
    found: list[Interval] = []
    for begin, end in sorted(intervals):
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((begin, end))
    return found


def total(intervals: Iterable[Interval]) -> float:
    """Return the length of the union."""
    return sum(end - begin for begin, end in merged(intervals))


def shared(first: Iterable[Interval], second: Iterable[Interval]) -> float:
    """Return the length of the intersection of both sets."""
    one, other = merged(first), merged(second)
    # Rounding could make it negative.
    return max(0.0, total(one) + total(other) - total([*one, *other]))
