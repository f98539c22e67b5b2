"""Lengths of sets of time intervals, which are pairs of begin and end."""

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
    ones, others = merged(first), merged(second)
    time, index = 0.0, 0
    for begin, end in ones:
        while index < len(others) and others[index][1] <= begin:
            index += 1
        place = index  # an interval of the second set may overlap with the next one of the first
        while place < len(others) and others[place][0] < end:
            time += min(end, others[place][1]) - max(begin, others[place][0])
            place += 1
    return time
