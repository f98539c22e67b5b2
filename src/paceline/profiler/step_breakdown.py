"""The accounting of a profile: the steps of all ranks side by side, with bubbles and communication separated.

A collective ends when its last rank has arrived and the data have been sent. Waiting before the last rank arrives is a
bubble caused by that rank; waiting afterwards is communication. Telling them apart requires the records of all ranks on
one clock. Decision 0028 gives the reasons.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from paceline.profiler import step_parts
from paceline.profiler.rank_file import RankRecord
from paceline.profiler.steps import MEETING, Step, offset_at

Seconds = list[float]
"""Values by rank; NaN if a rank did not take the step."""


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
