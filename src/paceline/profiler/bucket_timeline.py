"""The buckets of detailed steps: when each rank launched and finished them, and how much of their time backward hid."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from paceline.core.spans import BACKWARD, DONE, GRADIENT, LAUNCH, REDUCE, SENT, Span
from paceline.profiler import step_parts
from paceline.profiler.rank_file import RankRecord
from paceline.profiler.step_breakdown import steps_by_number
from paceline.profiler.steps import Interval, Step, cut_into_stretches, offset_at, shared, total

COMPUTING = (step_parts.FORWARD, step_parts.BACKWARD, step_parts.OPTIMIZER)
"""Parts of a step that may hide all-reduces."""
Steps = Sequence[Step]
"""One step on all ranks."""


@dataclass(frozen=True)
class BucketTimes:
    """Times of one gradient bucket in one step, by rank, in seconds since the step began."""

    bucket: int
    nbytes: int
    launched: Sequence[float]
    """When each rank handed over the full bucket for communication."""
    finished: Sequence[float | None]
    """When the bucket's all-reduce finished on each rank; None if unknown."""


def detailed_steps(records: Sequence[RankRecord]) -> list[Steps]:
    """Return the detailed steps that all ranks took, on rank 0's clock."""
    together: list[Steps] = []
    for ranks in steps_by_number(records).values():
        rank_steps = [step for step in ranks if step is not None and step.kind == "detailed" and step.spans]
        if len(rank_steps) == len(records):
            offsets = [offset_at(step.start, record.offsets) for step, record in zip(rank_steps, records, strict=True)]
            together.append([_moved(step, offset) for step, offset in zip(rank_steps, offsets, strict=True)])
    return together


def _moved(step: Step, offset: float) -> Step:
    if not offset:
        return step
    spans = [span._replace(start=span.start - offset, end=span.end - offset) for span in step.spans]
    return replace(step, start=step.start - offset, end=step.end - offset, spans=spans)


def bucket_times(steps: Steps, sizes: Sequence[int]) -> list[BucketTimes]:
    """Return when each bucket of a step was launched and finished, in seconds since the first rank began the step.

    The result is empty if ranks launched different numbers of buckets, or launched a bucket more than once.
    """
    zero = min(step.start for step in steps)
    launched = [[span for span in step.spans if span.label == LAUNCH] for step in steps]
    counts = {len(spans) for spans in launched}
    if len(counts) != 1 or not launched[0]:
        return []
    count = counts.pop()
    sent, finished = [_sent(step, spans) for step, spans in zip(steps, launched, strict=True)], _finished(steps, count)
    return [
        BucketTimes(
            number,
            sizes[number] if len(sizes) == count else 0,
            [ends[number] - zero for ends in sent],
            [None if ends is None else ends[number] - zero for ends in finished],
        )
        for number in range(count)
    ]


def _sent(step: Step, launches: Sequence[Span]) -> list[float]:
    """Return when a rank began the all-reduce of each bucket. Without marks, this is the end of the bucket's launch."""
    marks = _marks(step, SENT)
    return marks if len(marks) == len(launches) else [span.end for span in launches]


def _marks(step: Step, label: str) -> list[float]:
    return [end for _, end in sorted((span.bucket or 0, span.end) for span in step.spans if span.label == label)]


def _finished(steps: Steps, count: int) -> list[list[float] | None]:
    """Return when each bucket was finished, by rank; None for a rank whose finish times are unknown.

    In shared memory every rank reduces its share, in launch order, and a bucket is finished once all ranks have reduced
    their shares.
    """
    shares = [[span.end for span in step.spans if span.label == REDUCE][:count] for step in steps]
    if all(len(ends) == count for ends in shares):
        ends = [max(together) for together in zip(*shares, strict=True)]
        return [ends] * len(steps)
    marks = [_marks(step, DONE) for step in steps]
    return [times if len(times) == count else None for times in marks]


def reduced_and_hidden(steps: Steps, buckets: Sequence[BucketTimes]) -> list[tuple[float, float] | None]:
    """Return, by rank, how many seconds all-reduces took in one step, and how many were hidden behind computing.

    A rank's value is None if it is unknown when its all-reduces ended. Copying into buckets and reducing a share in
    shared memory count as communication, not as computing.
    """
    zero = min(step.start for step in steps)
    result: list[tuple[float, float] | None] = []
    for rank, step in enumerate(steps):
        reducing = all_reduces(buckets, [bucket.finished[rank] for bucket in buckets])
        stretches, _ = cut_into_stretches(step.spans, step.start, step.end)
        computing = [(begin - zero, end - zero) for part, begin, end in stretches if part in COMPUTING]
        result.append((total(reducing), shared(reducing, computing)) if reducing else None)
    return result


def all_reduces(buckets: Sequence[BucketTimes], ends: Sequence[float | None]) -> list[Interval]:
    """Return the interval of each bucket's all-reduce, given its end; empty if any end is unknown.

    An all-reduce begins once all ranks have launched it and the previous one has finished.
    """
    intervals, previous = list[Interval](), 0.0
    for bucket, end in zip(buckets, ends, strict=True):
        if end is None:
            return []
        begin = max(*bucket.launched, previous)
        previous = max(previous, end)
        intervals.append((begin, max(begin, end)))
    return intervals


def gradient_times(step: Step) -> list[tuple[int, float]]:
    """Return parameters in the order in which their gradients arrived, with the seconds of backward for each.

    These are the seconds since the previous arrival, without communication. If a gradient arrived several times, the
    last arrival counts.
    """
    marks = {span.bucket or 0: span.start for span in step.spans if span.label == GRADIENT}
    arrived = sorted(marks.items(), key=lambda mark: mark[1])
    if not arrived:
        return []
    (_, first), (_, last) = arrived[0], arrived[-1]
    begin = max((span.start for span in step.spans if span.label == BACKWARD and span.start <= first), default=first)
    stretches, _ = cut_into_stretches(step.spans, begin, last)
    computing = [(start, end) for part, start, end in stretches if part == step_parts.BACKWARD]
    starts, done = [start for start, _ in computing], [0.0, *accumulate(end - start for start, end in computing)]
    previous, result = 0.0, []
    for index, when in arrived:
        begun = bisect_right(starts, when)
        rest = max(0.0, computing[begun - 1][1] - when) if begun else 0.0  # of the stretch that goes on at this time
        now = done[begun] - rest
        result.append((index, now - previous))
        previous = now
    return result
