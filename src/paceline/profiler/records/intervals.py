"""Lengths of sets of intervals of time, each a begin and an end."""

from __future__ import annotations

from collections.abc import Iterable

Interval = tuple[float, float]


def merged(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the same set as intervals that neither overlap nor touch, in their order."""
    found: list[Interval] = []
    for begin, end in sorted(intervals):
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((begin, end))
    return found


def total(intervals: Iterable[Interval]) -> float:
    """Return the time that any of the intervals covers."""
    return sum(end - begin for begin, end in merged(intervals))


def shared(first: Iterable[Interval], second: Iterable[Interval]) -> float:
    """Return the time that both sets cover."""
    ones, others = merged(first), merged(second)
    time, index = 0.0, 0
    for begin, end in ones:
        while index < len(others) and others[index][1] <= begin:
            index += 1
        place = index  # which stays: an interval of the second set may reach into the next one of the first
        while place < len(others) and others[place][0] < end:
            time += min(end, others[place][1]) - max(begin, others[place][0])
            place += 1
    return time
