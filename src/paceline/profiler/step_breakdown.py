"""The accounting of a profile: the steps of all ranks side by side, their bubbles, and their buckets.

A collective ends when its last rank has arrived and the data have been sent. Waiting before the last rank arrives is a
bubble caused by that rank; waiting afterwards is communication. Telling them apart requires the records of all ranks on
one clock. Decision 0028 gives the reasons.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate

from paceline.core.spans import BACKWARD, DONE, GRADIENT, LAUNCH, REDUCE, SENT, Span
from paceline.profiler import step_parts
from paceline.profiler.rank_file import RankRecord
from paceline.profiler.steps import MEETING, Interval, Step, cut_into_stretches, offset_at, shared, total

Seconds = list[float]
"""Values by rank; NaN if a rank did not take the step."""
Steps = Sequence[Step]
"""One step on all ranks."""
COMPUTING = (step_parts.FORWARD, step_parts.BACKWARD, step_parts.OPTIMIZER)
"""Parts of a step that may hide all-reduces."""


@dataclass(frozen=True)
class Accounts:
    """The measured steps of a run: lists by step, each with a value for every rank."""

    steps: list[int]
    taken: list[list[Step | None]]
    parts: dict[str, list[Seconds]]
    """Seconds by part, in the order of :data:`~paceline.profiler.step_parts.ALL`."""
    waited_for: list[list[float]]
    """Seconds per step that a rank (row) spent in bubbles caused by another rank (column)."""

    def figures(self, name: str) -> list[Seconds]:
        """Return a figure of every step on every rank, such as ``rows``."""
        return [[float(getattr(step, name)) if step else math.nan for step in ranks] for ranks in self.taken]

    @cached_property
    def lengths(self) -> list[Seconds]:
        """Length of each step."""
        return self.figures("length")

    @cached_property
    def delayed(self) -> list[Seconds]:
        """Seconds that the rank was ready to run but had no core."""
        return self.figures("delayed")

    def busy(self) -> list[Seconds]:
        """Return the time of each step, excluding waiting."""
        waiting = [self.parts[part] for part in step_parts.WAITING]
        return [
            [length - sum(part[at][rank] for part in waiting) for rank, length in enumerate(lengths)]
            for at, lengths in enumerate(self.lengths)
        ]

    def caused(self, rank: int) -> float:
        """Return the mean seconds per step that another rank spends in bubbles caused by `rank`."""
        return math.fsum(row[rank] for row in self.waited_for) / max(1, len(self.waited_for) - 1)

    def notable_ranks(self, limit: int) -> list[int]:
        """Return the `limit` ranks that others waited for most, in the order of ranks."""
        ranks = range(len(self.waited_for))
        return sorted(sorted(ranks, key=lambda rank: -sum(row[rank] for row in self.waited_for))[:limit])

    def delay_of(self, rank: int) -> float:
        """Return the mean seconds per step during which `rank` was ready to run but had no core."""
        return mean_of([[row[rank]] for row in self.delayed])

    def mean(self, part: str) -> float:
        """Return the mean seconds per step that a rank spends in `part`."""
        return mean_of(self.parts[part])


def mean_of(table: Sequence[Sequence[float]]) -> float:
    """Return the mean of the values that are not NaN; 0 if there are none."""
    present = [value for row in table for value in row if not math.isnan(value)]
    return math.fsum(present) / len(present) if present else 0.0


def account(records: Sequence[RankRecord]) -> Accounts:
    """Combine the measured steps of all ranks."""
    steps = steps_by_number(records)
    numbers = [number for number, ranks in steps.items() if any(step and step.is_measured() for step in ranks)]
    selected = [steps[number] for number in numbers]
    waited_for = [[0.0] * len(records) for _ in records]
    cut: list[list[dict[str, float]]] = []
    for ranks in selected:
        bubbles = find_bubbles(ranks, records)
        cut.append([_cut_step(step, bubbles[rank]) if step else {} for rank, step in enumerate(ranks)])
        for rank, causes in enumerate(bubbles):
            for cause, seconds in causes.items():
                waited_for[rank][cause] += seconds / len(numbers)
    parts = {
        part: [[seconds.get(part, 0.0) if seconds else math.nan for seconds in row] for row in cut]
        for part in step_parts.ALL
    }
    return Accounts(numbers, selected, parts, waited_for)


def steps_by_number(records: Sequence[RankRecord]) -> dict[int, list[Step | None]]:
    """Return every rank's record of each step; None if a rank did not take the step."""
    by_rank = [{step.number: step for step in record.steps} for record in records]
    numbers = sorted({number for steps in by_rank for number in steps})
    return {number: [steps.get(number) for steps in by_rank] for number in numbers}


def _cut_step(step: Step, bubbles: dict[int, float]) -> dict[str, float]:
    """Return the step's parts, with its meetings split into bubbles and communication."""
    seconds = dict(step.seconds)
    met = seconds.pop(MEETING, 0.0)
    # Rounding could make the bubbles longer than the meetings.
    bubble = min(met, math.fsum(bubbles.values()))
    seconds[step_parts.BUBBLE] = bubble
    seconds[step_parts.COMMUNICATION] = seconds.get(step_parts.COMMUNICATION, 0.0) + met - bubble
    return seconds


def find_bubbles(steps: Sequence[Step | None], records: Sequence[RankRecord]) -> list[dict[int, float]]:
    """Return, for each rank, how many seconds of a step it waited for each of the ranks that arrived last.

    A group's meetings are matched by order. If its ranks recorded different numbers of meetings, the waiting counts as
    communication.
    """
    bubbles: list[dict[int, float]] = [{} for _ in records]
    for name in dict.fromkeys(meeting.group for step in steps if step for meeting in step.meetings):
        # Groups are written at the end, so killed ranks lack them.
        ranks = next((record.groups[name] for record in records if record.groups.get(name)), range(len(records)))
        group_steps = [step for rank in ranks if rank < len(steps) and (step := steps[rank]) is not None]
        meetings = [[meeting for meeting in step.meetings if meeting.group == name] for step in group_steps]
        if len(group_steps) < max(2, len(ranks)) or len(set(map(len, meetings))) > 1:
            continue
        for together in zip(*meetings, strict=True):
            # Compare the times of different hosts on the clock of rank 0.
            offsets = [offset_at(met.came, records[rank].offsets) for rank, met in zip(ranks, together, strict=True)]
            came = [met.came - offset for met, offset in zip(together, offsets, strict=True)]
            last = max(came)
            cause = ranks[came.index(last)]
            for rank, met, begin, offset in zip(ranks, together, came, offsets, strict=True):
                # A rank may leave before the last one arrives, for example the root of a broadcast.
                waited = min(last, met.left - offset) - begin
                if waited > 0:
                    bubbles[rank][cause] = bubbles[rank].get(cause, 0.0) + waited
    return bubbles


@dataclass(frozen=True)
class BucketTimes:
    """Times of one gradient bucket in one step, by rank, in seconds since the step began."""

    bucket: int
    nbytes: int
    launched: Sequence[float]
    """When each rank handed over the full bucket for communication."""
    finished: Sequence[float | None]
    """When the bucket's all-reduce finished on each rank; None if unknown."""


def detailed_steps(records: Sequence[RankRecord], label: str | None = None) -> list[Steps]:
    """Return the detailed steps, or the measured steps with a span `label`, that all ranks took, on rank 0's clock."""

    def is_wanted(step: Step) -> bool:
        if label is None:
            return step.kind == "detailed" and bool(step.spans)
        return step.is_measured() and any(span.label == label for span in step.spans)

    together: list[Steps] = []
    for ranks in steps_by_number(records).values():
        rank_steps = [step for step in ranks if step is not None and is_wanted(step)]
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
