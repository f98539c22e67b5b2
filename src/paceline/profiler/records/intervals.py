"""Lengths of sets of time intervals. An interval is a pair of start and end."""

from __future__ import annotations

from collections.abc import Iterable

Interval = tuple[float, float]


def merged(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the union as sorted intervals that neither overlap nor touch."""
    result: list[Interval] = []
    for begin, end in sorted(intervals):
        if result and begin <= result[-1][1]:
            result[-1] = (result[-1][0], max(result[-1][1], end))
        else:
            result.append((begin, end))
    return result


def total(intervals: Iterable[Interval]) -> float:
    """Return the length of the union."""
    return sum(end - begin for begin, end in merged(intervals))


def shared(first: Iterable[Interval], second: Iterable[Interval]) -> float:
    """Return the length of the intersection of both sets."""
    left, right = merged(first), merged(second)
    # Rounding could make it negative.
    return max(0.0, total(left) + total(right) - total([*left, *right]))
