"""One rank's steps: the time of each cut into parts, and where it met other ranks.

A step ends with the optimizer's; further optimizers of the same backward belong to it. What lies between two steps
belongs to the later one.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from paceline.profiler.report import BACKWARD, CHECKPOINT, COMMUNICATION, DATA, FORWARD, OPTIMIZER, OTHER
from paceline.tracing import BACKWARD as BACKWARD_SPAN
from paceline.tracing import (
    BUCKET_WAIT,
    COLLECTIVE,
    CONTROL,
    DATA_WAIT,
    LAUNCH,
    REDUCE,
    WAIT,
    Span,
)
from paceline.tracing import CHECKPOINT as CHECKPOINT_SPAN
from paceline.tracing import FORWARD as FORWARD_SPAN
from paceline.tracing import OPTIMIZER as OPTIMIZER_SPAN

MEASURED = ("detailed", "plain")
"""Kinds of steps that count in figures."""
MOST = 10_000
"""Measured steps of a run: a longer one is described by its first ones."""
MEETING = "meeting"
"""Time in collectives, before it is split into bubbles and communication."""
LEAD = "lead"
"""Time before the first forward that no span covers."""
_PARTS = {
    DATA_WAIT: DATA,
    FORWARD_SPAN: FORWARD,
    BACKWARD_SPAN: BACKWARD,
    LAUNCH: COMMUNICATION,
    REDUCE: COMMUNICATION,
    CONTROL: COMMUNICATION,
    WAIT: MEETING,
    BUCKET_WAIT: MEETING,
    COLLECTIVE: MEETING,
    OPTIMIZER_SPAN: OPTIMIZER,
    CHECKPOINT_SPAN: CHECKPOINT,
}
_WHOLE = (MEETING, CHECKPOINT)
"""Parts that take what lies inside them."""


@dataclass(frozen=True)
class Meeting:
    """A collective in which this rank waited: it `came` when it had nothing else to do, and `left` when it was over."""

    group: str
    came: float
    left: float


@dataclass(frozen=True)
class Step:
    """A step on one rank; times in seconds of its ``time.perf_counter``."""

    number: int
    kind: str
    """``warm-up``, ``detailed``, ``traced`` (by torch's profiler), ``plain``, or ``crowded``:
    with more spans than are kept."""
    start: float
    end: float
    seconds: dict[str, float]
    """By part, with :data:`MEETING` in place of bubbles and waiting for communication, and :data:`LEAD` apart from
    other time; they add up to its length."""
    meetings: list[Meeting]
    rows: int = 0
    """Rows of the model's first input."""
    batches: int = 1
    """Forwards: more than one where gradients are accumulated."""
    norms: tuple[float, float] | None = None
    """Squared norms of this rank's gradient and of the average, where they were taken."""
    spans: list[Span] = field(default_factory=list)
    """Kept for some steps only."""

    @property
    def length(self) -> float:
        """Seconds."""
        return self.end - self.start

    def is_measured(self) -> bool:
        """Whether it counts in figures."""
        return self.kind in MEASURED


def cut(spans: Iterable[Span], start: float, end: float) -> tuple[dict[str, float], list[Meeting]]:
    """Cut the time from `start` to `end` into parts, and find the meetings.

    Returns:
        Seconds by part, which add up to ``end - start``, and the outermost meetings in their order.
    """
    seconds: dict[str, float] = {}
    stretches, meetings = cut_into_stretches(spans, start, end)
    for part, begin, stop in stretches:
        seconds[part] = seconds.get(part, 0.0) + (stop - begin)
    return seconds, meetings


def cut_into_stretches(
    spans: Iterable[Span], start: float, end: float
) -> tuple[list[tuple[str, float, float]], list[Meeting]]:
    """Cut the time from `start` to `end` where another span becomes the innermost one, and find the meetings.

    Returns:
        Parts with their begin and end, one after the other, and the outermost meetings in their order.
    """
    stretches: list[tuple[str, float, float]] = []
    meetings: list[Meeting] = []
    stack: list[tuple[float, str]] = []  # end and part of the spans that are open, the outermost first
    now = start

    uncovered = LEAD

    def go_to(time: float) -> None:
        nonlocal now
        if time > now:
            stretches.append((stack[-1][1] if stack else uncovered, now, time))
            now = time

    for span in sorted(spans, key=lambda span: (span.start, -span.end)):
        part = _PARTS.get(span.label)
        if part is None or span.end <= start or span.start >= end:
            continue
        while stack and stack[-1][0] <= span.start:
            go_to(stack[-1][0])
            stack.pop()
        go_to(max(start, span.start))
        if part == FORWARD:
            uncovered = OTHER
        last = min(end, span.end, stack[-1][0] if stack else end)
        if stack and stack[-1][1] in _WHOLE:
            part = stack[-1][1]
        elif part == MEETING:
            meetings.append(Meeting(span.group or "", max(start, span.start), last))
        stack.append((last, part))
    while stack:
        go_to(stack[-1][0])
        stack.pop()
    go_to(end)
    return stretches, meetings
