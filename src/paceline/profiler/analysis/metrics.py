"""The figures of a run that advice rests on, gathered once from the records of all ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import fmean, median
from typing import Any

from paceline.core.telemetry.spans import LAUNCH, REDUCE, Span
from paceline.profiler.analysis.bucket_timeline import Lanes, Steps, bucket_times, detailed_steps, lanes
from paceline.profiler.analysis.operator_table import OperatorTable
from paceline.profiler.analysis.step_breakdown import Accounts, account, mean_of
from paceline.profiler.analysis.straggler_check import ENOUGH, is_lasting, late_since, others_of
from paceline.profiler.records.core_use import Load, load_of
from paceline.profiler.records.rank_file import RankRecord
from paceline.profiler.records.steps import Step
from paceline.profiler.report import step_parts
from paceline.profiler.report.report import BucketTimes, SlowRank
from paceline.profiler.stragglers.detection import Straggler, find_stragglers

_SLOWDOWN, _NOTABLE = 1.15, 0.08
"""Ratio of a straggler's computing time, and the share of the time that others wait for it. Less is usual among clean
ranks of one host: a rank that sleeps in a collective wakes late, and cores and caches differ."""
_LEAST = 0.001
"""Seconds of a step that others must wait for a straggler: less is the time in which ranks of one host wake each
other."""
_LEAST_OWN = 0.1
"""Share of a rank's time from which its own is known: it may have lacked a core while it waited, too."""
_ADD = 1.5
"""Cost of adding a gradient to an earlier one, in copies into a bucket: it moves three times its bytes, a copy two."""


def _launching(step: Step) -> float:
    """Return the seconds of a step in which buckets are launched, without reductions that run inside a launch."""
    launches = [span for span in step.spans if span.label == LAUNCH]
    inside = [span for span in step.spans if span.label == REDUCE and _is_in_any(span, launches)]
    return math.fsum(span.seconds for span in launches) - math.fsum(span.seconds for span in inside)


def _is_in_any(inner: Span, launches: Sequence[Span]) -> bool:
    return any(span.start <= inner.start and inner.end <= span.end for span in launches)


def differences(table: Sequence[Sequence[float]], rank: int) -> dict[int, float]:
    """Return what `rank` has more than the median of the others, by row; rows where either is missing are left out."""
    found = {}
    for index, row in enumerate(table):
        if (others := others_of(row, rank)) and not math.isnan(row[rank]):
            found[index] = row[rank] - median(others)
    return found


@dataclass(frozen=True)
class Facts:
    """Figures of one run, each computed once, when it is first used."""

    records: Sequence[RankRecord]
    operators: OperatorTable
    traces: Sequence[dict[str, Any]] = ()
    """Traces of torch's profiler, by rank; empty where a rank left none."""

    @cached_property
    def accounts(self) -> Accounts:
        """The measured steps."""
        return account(self.records)

    @property
    def has_loader(self) -> bool:
        """Whether a DataLoader was seen; without one, the time before a step's forward counts as waiting for data."""
        return any(record.loaders_seen for record in self.records)

    @cached_property
    def length(self) -> float:
        """Mean seconds of a step."""
        return self.accounts.mean_length()

    @property
    def is_firm(self) -> bool:
        """Whether enough steps were measured for a verdict."""
        return len(self.accounts.steps) >= ENOUGH

    @cached_property
    def shares(self) -> dict[str, float]:
        """Share of each part in the steps' time; zeros where there are no steps."""
        return {part: self.accounts.mean(part) / self.length if self.length else 0.0 for part in step_parts.ALL}

    @cached_property
    def batches(self) -> float:
        """Mean number of forwards in a step."""
        counts = [step.batches for record in self.records for step in record.steps if step.is_measured()]
        return max(1.0, fmean(counts)) if counts else 1.0

    @cached_property
    def averages(self) -> float:
        """Mean number of backwards in a step that averaged gradients."""
        counts = [step.averages for record in self.records for step in record.steps if step.is_measured()]
        return max(1.0, fmean(counts)) if counts else 1.0

    @cached_property
    def rows(self) -> float | None:
        """Mean number of rows in a step, all ranks together."""
        sums = [math.fsum(row for row in rows if not math.isnan(row)) for rows in self.accounts.rows]
        return fmean(sums) if sums and any(sums) else None

    @cached_property
    def detailed(self) -> list[Steps]:
        """The detailed steps that all ranks took."""
        return detailed_steps(self.records)

    @cached_property
    def buckets(self) -> list[list[BucketTimes]]:
        """The buckets of each detailed step."""
        return [bucket_times(steps, self.records[0].buckets) for steps in self.detailed]

    @cached_property
    def lanes(self) -> list[list[Lanes | None]]:
        """Times of computing and of all-reduces on each rank, for each detailed step."""
        return [lanes(steps, times) for steps, times in zip(self.detailed, self.buckets, strict=True)]

    @cached_property
    def all_reduces_run(self) -> float | None:
        """Median seconds of a step in which all-reduces ran, mean of the ranks; None where it was not seen."""
        known = [[lane.busy_and_hidden()[0] for lane in ranks if lane is not None] for ranks in self.lanes]
        return median(fmean(busy) for busy in known if busy) / 1e6 if any(known) else None

    @cached_property
    def overlap(self) -> dict[int, float]:
        """Share of the all-reduces' time in which the rank computed, by rank; ranks that cannot tell are left out.

        A GPU's kernels tell it where there are any.
        """
        if self.operators.overlap:
            return dict(self.operators.overlap)
        found = {}
        for rank in range(len(self.records)):
            times = [lane.busy_and_hidden() for ranks in self.lanes if (lane := ranks[rank]) is not None]
            if busy := sum(busy for busy, _ in times):
                found[rank] = sum(hidden for _, hidden in times) / busy
        return found

    @cached_property
    def all_reduce(self) -> float:
        """Seconds of a step in which all-reduces run, but at least the seconds by which they make a step longer."""
        shown = self.accounts.mean(step_parts.COMMUNICATION)
        shares_the_core = any(record.wrapper == "paceline" and record.backend == "paceline" for record in self.records)
        # In shared memory, ranks reduce on the cores that compute, so the whole cost is in the parts already.
        if self.all_reduces_run is None or shares_the_core:
            return shown
        return max(shown, self.all_reduces_run)

    def all_reduce_share(self, times: float = 1.0) -> float:
        """Return all-reduce's share of the work, if `times` as many batches were accumulated between all-reduces.

        Work is forward, backward, optimizer and all-reduce, without waiting for other ranks and for data; and adding up
        gradients, which a batch that is accumulated costs beside its forward and backward.
        """
        mean = self.accounts.mean
        adding = (times - 1) * self.batches * _ADD * self.copying
        work = (
            times * (mean(step_parts.FORWARD) + mean(step_parts.BACKWARD))
            + adding
            + mean(step_parts.OPTIMIZER)
            + self.all_reduce
        )
        return self.all_reduce / work if work else 0.0

    @cached_property
    def copying(self) -> float:
        """Median seconds of a step in which gradients are copied into buckets."""
        times = [_launching(step) for steps in self.detailed for step in steps]
        return max(0.0, median(times)) if times else 0.0

    @cached_property
    def bucket_work(self) -> float:
        """Median seconds of a step in which a rank itself copies, launches and reduces buckets."""
        times = [
            _launching(step) + math.fsum(span.seconds for span in step.spans if span.label == REDUCE)
            for record in self.records
            for step in record.steps
            if step.is_measured() and step.spans
        ]
        return median(times) if times else 0.0

    @cached_property
    def load(self) -> Load | None:
        """The load on the cores of the most delayed rank; None where that is not known."""
        if not self.accounts.steps or not self.length:
            return None
        return load_of(self.records, [self.accounts.delay_of(rank) / self.length for rank in range(len(self.records))])

    @property
    def is_loaded(self) -> bool:
        """Whether other programs, or the ranks' own number, kept a rank from its core."""
        return self.load is not None and (self.load.is_by_others() or self.load.is_by_ranks())

    @cached_property
    def own_times(self) -> list[list[float]]:
        """Seconds of each step on each rank, without waiting, and without what others on its cores took of them.

        Where there are enough cores for all ranks, and nobody else is on them, a rank that lacks one was given too few,
        and that counts. NaN where hardly anything is left.
        """
        busy = self.accounts.busy()
        if not self.is_loaded:
            return busy
        return [
            [own - lost if own - lost >= _LEAST_OWN * own else math.nan for own, lost in zip(row, delays, strict=True)]
            for row, delays in zip(busy, self.accounts.delayed, strict=True)
        ]

    @cached_property
    def stragglers(self) -> list[SlowRank]:
        """Ranks that computed longer than the others, as far as these waited for them."""
        if len(self.records) < 2 or not self.accounts.steps:
            return []
        found = map(self._with_begin, find_stragglers(self.own_times, min_slowdown=_SLOWDOWN))
        return [self._describe(straggler) for straggler in found if self._is_notable(straggler)]

    def _with_begin(self, straggler: Straggler) -> Straggler:
        """Return `straggler` with the step since which it is late, where it became late, by its seconds."""
        if straggler.kind != "emerging":
            return straggler
        late = differences(self.own_times, straggler.rank)
        numbers, seconds = list(late), list(late.values())
        begin = late_since(seconds)
        # Only a later begin counts: the ratios by which it was found name a rank too early, see late_since().
        if begin is None or numbers[begin] <= straggler.first_step:
            return straggler
        first, lost = numbers[begin], seconds[begin:]
        own = [self.own_times[row][straggler.rank] for row in numbers[begin:]]
        slowdown = median(one / max(one - more, 1e-9) for one, more in zip(own, lost, strict=True))
        return replace(
            straggler, first_step=first, slowdown=slowdown, steps_slow=len(lost), seconds_lost=math.fsum(lost)
        )

    def _is_notable(self, straggler: Straggler) -> bool:
        """Return whether others waited for it long enough to matter, and not by chance."""
        if self.accounts.caused(straggler.rank) <= max(_NOTABLE * self.length, _LEAST):
            return False
        steps = slice(straggler.first_step, straggler.last_step + 1)
        lengths = [mean_of([row]) for row in self.accounts.lengths[steps]]
        return is_lasting(self.own_times[steps], lengths, straggler.rank)

    def _describe(self, straggler: Straggler) -> SlowRank:
        accounts = self.accounts
        rows = range(straggler.first_step, straggler.last_step + 1)
        lost = {}
        for part in step_parts.ALL:
            if part not in step_parts.WAITING:
                longer = differences(accounts.parts[part][rows.start : rows.stop], straggler.rank)
                lost[part] = fmean(longer.values()) if longer else 0.0
        phase = max(lost, key=lambda part: lost[part])
        slowdown, seconds = straggler.slowdown, straggler.seconds_lost / max(1, straggler.steps_slow)
        if self.is_loaded:  # found without delays, but told with them, as the page shows all times
            own = math.fsum(mean_of([[accounts.parts[part][row][straggler.rank]] for row in rows]) for part in lost)
            slowdown, seconds = own / max(own - math.fsum(lost.values()), 1e-9), lost[phase]
        first, last, kind = straggler.first_step, straggler.last_step, straggler.kind
        late = differences(accounts.parts[phase], straggler.rank)
        begin = late_since(list(late.values()))
        if begin is not None:  # by one part alone, which other work on the host disturbs less than all of them
            since = list(late)[begin:]
            first, last, kind = since[0], since[-1], "emerging"
            seconds = fmean(late[row] for row in since)
        return SlowRank(
            straggler.rank,
            accounts.steps[first],
            accounts.steps[last],
            slowdown,
            kind,
            phase,
            seconds,
        )
