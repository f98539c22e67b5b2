"""The buckets of detailed steps: when each was launched and finished on every rank, and how much backward hid."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean

from paceline.profiler.accounting import steps_by_number
from paceline.profiler.clocks import offset_at
from paceline.profiler.rank_file import RankRecord
from paceline.profiler.report import BucketTimes
from paceline.profiler.steps import Step
from paceline.tracing import DONE, GRADIENT, LAUNCH, REDUCE, WAIT

Steps = Sequence[Step]
"""One step on all ranks."""


def detailed_steps(records: Sequence[RankRecord]) -> list[Steps]:
    """Return the detailed steps that all ranks took, on rank 0's clock."""
    together: list[Steps] = []
    for ranks in steps_by_number(records).values():
        taken = [step for step in ranks if step is not None and step.kind == "detailed" and step.spans]
        if len(taken) == len(records):
            offsets = [offset_at(step.start, record.offsets) for step, record in zip(taken, records, strict=True)]
            together.append([_moved(step, offset) for step, offset in zip(taken, offsets, strict=True)])
    return together


def _moved(step: Step, offset: float) -> Step:
    if not offset:
        return step
    spans = [replace(span, start=span.start - offset, end=span.end - offset) for span in step.spans]
    return replace(step, start=step.start - offset, end=step.end - offset, spans=spans)


def bucket_times(steps: Steps, sizes: Sequence[int]) -> list[BucketTimes]:
    """Return when each bucket of one step was launched and finished, in seconds since the first rank began it.

    Empty where ranks launched different numbers of buckets, or a bucket more than once.
    """
    zero = min(step.start for step in steps)
    launched = [[span for span in step.spans if span.label == LAUNCH] for step in steps]
    counts = {len(spans) for spans in launched}
    if len(counts) != 1 or not launched[0]:
        return []
    count = counts.pop()
    finished = _finished(steps, count)
    return [
        BucketTimes(
            number,
            sizes[number] if len(sizes) == count else 0,
            [spans[number].end - zero for spans in launched],
            [None if ends is None else ends[number] - zero for ends in finished],
        )
        for number in range(count)
    ]


def _finished(steps: Steps, count: int) -> list[list[float] | None]:
    """Return when each bucket was finished on each rank; None for a rank that cannot tell.

    In shared memory every rank reduces its share, in the order of launch, and the bucket is finished with the last.
    """
    shares = [[span.end for span in step.spans if span.label == REDUCE][:count] for step in steps]
    if all(len(ends) == count for ends in shares):
        ends = [max(together) for together in zip(*shares, strict=True)]
        return [ends] * len(steps)
    marks = [sorted((span.bucket or 0, span.end) for span in step.spans if span.label == DONE) for step in steps]
    return [[end for _, end in found] if len(found) == count else None for found in marks]


def busy_and_hidden(steps: Steps, buckets: Sequence[BucketTimes]) -> tuple[float, float] | None:
    """Return the seconds in which all-reduces ran in one step, and those of them before backward ended; rank means.

    An all-reduce runs from the launch of the last rank, or from the end of the one before, to its end. None where no
    rank knows the ends.
    """
    zero = min(step.start for step in steps)
    found = []
    for rank, step in enumerate(steps):
        waits = [span.start - zero for span in step.spans if span.label == WAIT]
        if not waits or any(bucket.finished[rank] is None for bucket in buckets):
            continue
        busy = hidden = before = 0.0
        for bucket in buckets:
            end = bucket.finished[rank] or 0.0
            begin = max(*bucket.launched, before)
            busy += max(0.0, end - begin)
            hidden += max(0.0, min(end, waits[-1]) - begin)
            before = max(before, end)
        found.append((busy, hidden))
    if not found or not buckets:
        return None
    return fmean(busy for busy, _ in found), fmean(hidden for _, hidden in found)


def gradient_times(step: Step) -> list[tuple[int, float]]:
    """Return each parameter with when its gradient arrived, in seconds since the step's first one, in that order."""
    marks = [(span.bucket or 0, span.start) for span in step.spans if span.label == GRADIENT]
    last = dict(marks)  # one that arrives more than once counts where it came last
    first = min((when for _, when in marks), default=0.0)
    return sorted(((index, when - first) for index, when in last.items()), key=lambda pair: pair[1])
