"""Steps of one rank: their parts, their meetings with other ranks, and the offset of the rank's clock.

A step ends when ``optimizer.step()`` returns. Another optimizer that steps after the same backward does not end a step.
The time between two steps belongs to the later one.
"""

from __future__ import annotations

import math
import os
import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch.distributed as dist

from paceline.comm.topology import SPLIT
from paceline.core import spans
from paceline.core.spans import Span
from paceline.profiler import step_parts

WARM_UP, DETAILED, TRACED = 3, 5, 3
"""Numbers of steps at the start: warm-up steps, steps that mark every gradient, and steps under torch's profiler.
Warm-up and profiler steps are not measured."""
KEPT = 100
"""Number of further steps that keep their spans."""
FLUSH_S = 5.0
"""Seconds between two writes. Writing each step separately costs three times as much."""
MEASURED = ("detailed", "plain")
"""Kinds of steps that the figures include."""
MOST = 10_000
"""Maximum number of measured steps in a run."""
MEETING = "meeting"
"""Name of the part for time in collectives, before it is split into bubbles and communication."""
_PARTS = {
    spans.DATA_WAIT: step_parts.DATA,
    spans.FORWARD: step_parts.FORWARD,
    spans.BACKWARD: step_parts.BACKWARD,
    spans.LAUNCH: step_parts.COMMUNICATION,
    spans.REDUCE: step_parts.COMMUNICATION,
    spans.CONTROL: step_parts.COMMUNICATION,
    spans.WAIT: MEETING,
    spans.BUCKET_WAIT: MEETING,
    spans.COLLECTIVE: MEETING,
    spans.OUTER_STEP: MEETING,
    spans.OPTIMIZER: step_parts.OPTIMIZER,
    spans.CHECKPOINT: step_parts.CHECKPOINT,
    spans.COLLECTOR: step_parts.COLLECTOR,
}
_WHOLE = (MEETING, step_parts.CHECKPOINT)
"""Parts that include the spans inside them."""
EXCHANGES = 12
"""All-gathers in one comparison of clocks."""
Interval = tuple[float, float]
"""Start and end of a time interval."""


class Meeting(NamedTuple):
    """A collective that this rank entered at `came` and left at `left`."""

    group: str
    came: float
    left: float


@dataclass
class Step:
    """A step on one rank. Times are seconds of its ``time.perf_counter``.

    Parts and meetings are added later, outside of the training step.
    """

    number: int
    kind: str
    """``warm-up``, ``detailed``, ``traced`` (by torch's profiler), ``plain``, or ``crowded`` (too many spans)."""
    start: float
    end: float
    seconds: dict[str, float]
    """Seconds by part, which add up to the length. :data:`MEETING` includes both bubbles and waiting for
    communication."""
    meetings: list[Meeting]
    rows: int = 0
    """Rows of the model's first input."""
    batches: int = 1
    """Number of forward passes; more than one if gradients are accumulated."""
    norms: tuple[float, float] | None = None
    """Squared norms of this rank's gradient and of the averaged gradient, if measured."""
    spans: list[Span] = field(default_factory=list)
    """Spans, which are kept only for some steps."""
    cells: int = 0
    """Cells (rows times columns) of the model's first input, including padding."""
    delayed: float = 0.0
    """Seconds that the rank's thread was ready to run but had no core."""
    loading: float = 0.0
    """Core seconds that the loop's own thread spent loading batches."""
    averages: int = 1
    """Number of backward passes that averaged gradients; more than one if gradients are accumulated without no_sync."""
    collected: int = 0
    """Number of objects that Python's garbage collector freed."""

    @property
    def length(self) -> float:
        """Length in seconds."""
        return self.end - self.start

    @property
    def outer_wait(self) -> float:
        """Seconds in outer steps of LocalSGD or DiLoCo."""
        return math.fsum(left - came for group, came, left in self.meetings if group == spans.OUTER_STEP)

    def is_measured(self) -> bool:
        """Return whether figures include the step."""
        return self.kind in MEASURED


def kind_of(number: int, traced: int) -> str:
    """Return the kind of step `number`, if `traced` steps run under torch's profiler."""
    # torch's profiler writes its trace during the step after the traced steps.
    ends = [WARM_UP, WARM_UP + DETAILED, WARM_UP + DETAILED + traced, WARM_UP + DETAILED + traced + bool(traced)]
    return ("warm-up", "detailed", "traced", "warm-up", "plain")[bisect_right(ends, number)]


def seconds_by_part(stretches: Iterable[tuple[str, float, float]]) -> dict[str, float]:
    """Return the seconds of each part, given `stretches`: tuples of part, start and end."""
    seconds: dict[str, float] = {}
    for part, begin, stop in stretches:
        seconds[part] = seconds.get(part, 0.0) + (stop - begin)
    return seconds


def cut_into_stretches(
    spans: Iterable[Span], start: float, end: float
) -> tuple[list[tuple[str, float, float]], list[Meeting]]:
    """Cut the time from `start` to `end` at every change of the innermost span.

    Returns:
        Consecutive parts with their starts and ends, and the outermost meetings in order.
    """
    stretches: list[tuple[str, float, float]] = []
    meetings: list[Meeting] = []
    stack: list[tuple[float, str]] = []  # end and part of the open spans, outermost first
    # The end of the last stretch, and the part and end of the innermost open span.
    cursor, outer, outer_end = start, step_parts.OTHER, end
    # If spans start at the same time, the longest one contains the others.
    for label, begin, stop, _, group, _ in sorted(spans, key=lambda span: (span.start, -span.end)):
        part = _PARTS.get(label)
        if part is None or stop <= start or begin >= end:
            continue
        while stack and outer_end <= begin:
            if outer_end > cursor:
                stretches.append((outer, cursor, outer_end))
                cursor = outer_end
            outer_end, outer = stack.pop()
        if begin > cursor:
            stretches.append((outer, cursor, begin))
            cursor = begin
        stack.append((outer_end, outer))
        outer_end = min(outer_end, stop)
        if outer not in _WHOLE:
            if part == MEETING:
                meetings.append(Meeting(group or "", max(start, begin), outer_end))
            outer = part
    while stack:
        if outer_end > cursor:
            stretches.append((outer, cursor, outer_end))
            cursor = outer_end
        outer_end, outer = stack.pop()
    if end > cursor:
        stretches.append((outer, cursor, end))
    return stretches, meetings


def are_apart() -> bool:
    """Return whether ranks may run on several hosts with different clocks. All ranks get the same answer."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return False
    local = os.environ.get("LOCAL_WORLD_SIZE")
    # In tests, SPLIT makes one host count as several.
    return SPLIT in os.environ or local is None or int(local) < dist.get_world_size()


def measure_offset(clock: Callable[[], float] = time.perf_counter) -> tuple[float, float, float]:
    """Compare this rank's clock with rank 0's, because different hosts have different clocks. Collective.

    No rank leaves an all-gather before all ranks have entered it. So rank 0 enters before this rank leaves, and vice
    versa: every exchange bounds the offset from both sides, and the tightest bounds of several exchanges are combined
    (after Duda, Harrus, Haddad and Bernard, "Estimating global time in distributed systems", ICDCS 1987).

    Returns:
        The time of the measurement on this rank's clock, how many seconds the clock is ahead, and the maximum error.
    """
    local_times: list[tuple[float, float]] = []
    for _ in range(EXCHANGES):
        begin = clock()
        dist.all_gather_object([None] * dist.get_world_size(), begin)
        local_times.append((begin, clock()))
    all_times: list[list[tuple[float, float]]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(all_times, local_times)
    offset, error = bound_offset(local_times, all_times[0])
    return local_times[-1][1], offset, error


def bound_offset(local: Sequence[tuple[float, float]], reference: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Return this clock's offset from another and the maximum error, given the starts and ends of exchanges."""
    low = max(begin - end for (begin, _), (_, end) in zip(local, reference, strict=True))
    high = min(end - begin for (_, end), (begin, _) in zip(local, reference, strict=True))
    # If clocks drift during the exchanges, the bounds may cross.
    return (low + high) / 2, abs(high - low) / 2


def offset_at(when: float, measured: Sequence[tuple[float, float, float]]) -> float:
    """Return the offset at `when`, on the line through the first and last measurements; 0 if there are none."""
    if not measured:
        return 0.0
    (first, begin, _), (last, end, _) = measured[0], measured[-1]
    if last <= first:
        return begin
    return begin + (end - begin) * (when - first) / (last - first)


def merged(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the union of `intervals`, sorted, as intervals that neither overlap nor touch."""
    result: list[Interval] = []
    for begin, end in sorted(intervals):
        if result and begin <= result[-1][1]:
            result[-1] = (result[-1][0], max(result[-1][1], end))
        else:
            result.append((begin, end))
    return result


def total(intervals: Iterable[Interval]) -> float:
    """Return the length of the union of `intervals`."""
    return sum(end - begin for begin, end in merged(intervals))


def shared(first: Iterable[Interval], second: Iterable[Interval]) -> float:
    """Return the length of the intersection of both sets."""
    left, right = merged(first), merged(second)
    # Rounding could make it negative.
    return max(0.0, total(left) + total(right) - total([*left, *right]))
