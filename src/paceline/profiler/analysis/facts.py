"""The figures of a run that advice rests on, gathered once from the records of all ranks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean, median
from typing import Any

from paceline.core.telemetry.spans import LAUNCH, REDUCE, Span
from paceline.profiler.analysis.bucket_timeline import Lanes, Steps, bucket_times, detailed_steps, lanes
from paceline.profiler.analysis.confidence import SLOWDOWN, WAKE_S, WORTH, is_lasting, late_since, others_of
from paceline.profiler.analysis.operator_table import OperatorTable
from paceline.profiler.analysis.step_breakdown import Accounts, account, mean_of
from paceline.profiler.records.core_use import Load, load_of
from paceline.profiler.records.rank_file import RankRecord
from paceline.profiler.records.steps import Step
from paceline.profiler.report import step_parts
from paceline.profiler.report.report import ENOUGH, BucketTimes, SlowRank
from paceline.profiler.stragglers.detection import Straggler, find_stragglers

ADDING = 1.5
"""Cost of adding a gradient to an earlier one, in copies into a bucket: it moves three times its bytes, a copy two."""
LEAST_OWN = 0.1
"""Share of a rank's time from which its own is known: it may have lacked a core while it waited, too."""


def differences(table: Sequence[Sequence[float]], rank: int) -> dict[int, float]:
    """Return what `rank` has more than the median of the others, by row; rows where either is missing are left out."""
    return {
        index: row[rank] - median(others)
        for index, row in enumerate(table)
        if (others := others_of(row, rank)) and not math.isnan(row[rank])
    }


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
        return mean_of(self.accounts.lengths)

    @property
    def is_firm(self) -> bool:
        """Whether enough steps were measured for a verdict."""
        return len(self.accounts.steps) >= ENOUGH

    @cached_property
    def shares(self) -> dict[str, float]:
        """Share of each part in the steps' time; zeros where there are no steps."""
        return {part: self.accounts.mean(part) / self.length if self.length else 0.0 for part in step_parts.ALL}

    @cached_property
    def _measured(self) -> list[Step]:
        return [step for record in self.records for step in record.steps if step.is_measured()]

    @cached_property
    def batches(self) -> float:
        """Mean number of forwards in a step."""
        return max(1.0, fmean(step.batches for step in self._measured)) if self._measured else 1.0

    @cached_property
    def averages(self) -> float:
        """Mean number of backwards in a step that averaged gradients."""
        return max(1.0, fmean(step.averages for step in self._measured)) if self._measured else 1.0

    @cached_property
    def loading(self) -> float:
        """Mean seconds of a core in which the loop's own thread loaded a step's batches."""
        return fmean(step.loading for step in self._measured) if self._measured else 0.0

    @cached_property
    def rows(self) -> float | None:
        """Mean number of rows in a step, all ranks together."""
        sums = [math.fsum(row for row in rows if not math.isnan(row)) for rows in self.accounts.rows]
        return fmean(sums) if any(sums) else None

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
        # In shared memory, ranks reduce on the cores that compute, so the whole cost is in the parts already.
        shares_the_core = any(record.wrapper == "paceline" and record.backend == "paceline" for record in self.records)
        ran = [[lane.busy_and_hidden()[0] for lane in ranks if lane is not None] for ranks in self.lanes]
        if shares_the_core or not any(ran):
            return shown
        return max(shown, median(fmean(busy) for busy in ran if busy) / 1e6)

    def all_reduce_share(self, times: float = 1.0) -> float:
        """Return all-reduce's share of the work, if `times` as many batches were accumulated between all-reduces.

        Work is forward, backward, optimizer and all-reduce, without waiting for other ranks and for data; and adding up
        gradients, which a batch that is accumulated costs beside its forward and backward.
        """
        mean = self.accounts.mean
        launching = [_launching(step) for steps in self.detailed for step in steps]
        adding = (times - 1) * self.batches * ADDING * max(0.0, median(launching)) if launching else 0.0
        computing = times * (mean(step_parts.FORWARD) + mean(step_parts.BACKWARD)) + mean(step_parts.OPTIMIZER)
        work = computing + adding + self.all_reduce
        return self.all_reduce / work if work else 0.0

    @cached_property
    def load(self) -> Load | None:
        """The load on the cores of the most delayed rank; None where that is not known."""
        if not self.accounts.steps or not self.length:
            return None
        # A rank may wait for a core while it waits for others, and clocks differ, so a sum may exceed the steps.
        delays = [min(1.0, self.accounts.delay_of(rank) / self.length) for rank in range(len(self.records))]
        return load_of(self.records, delays)

    @property
    def is_loaded(self) -> bool:
        """Whether other programs, or the ranks' own number, kept a rank from its core."""
        return self.load is not None and (self.load.is_by_others() or self.load.is_by_ranks())

    def longer(self, rank: int, parts: Iterable[str]) -> dict[int, float]:
        """Return by how much these `parts` are longer on `rank` than on the others, by row of the accounts."""
        tables = [differences(self.accounts.parts[part], rank) for part in parts]
        return {row: math.fsum(table[row] for table in tables) for row in tables[0]} if tables else {}

    def delays(self, rank: int) -> dict[int, float]:
        """Return by how much longer `rank` lacked a core than the others, by row; empty without other load."""
        return differences(self.accounts.delayed, rank) if self.is_loaded else {}

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
            [own - lost if own - lost >= LEAST_OWN * own else math.nan for own, lost in zip(row, delays, strict=True)]
            for row, delays in zip(busy, self.accounts.delayed, strict=True)
        ]

    @cached_property
    def stragglers(self) -> list[SlowRank]:
        """Ranks that computed longer than the others, as far as these waited for them."""
        if len(self.records) < 2 or not self.is_firm:
            return []
        found = find_stragglers(self.own_times, min_slowdown=SLOWDOWN)
        return [self._describe(straggler) for straggler in found if self._is_notable(straggler)]

    def _is_notable(self, straggler: Straggler) -> bool:
        """Return whether others waited for it long enough to matter, and not by chance."""
        if self.accounts.caused(straggler.rank) <= max(WORTH * self.length, WAKE_S):
            return False
        # One that became late is judged since then: ratios of short steps name it too early.
        late = self.longer(straggler.rank, _BUSY)
        since = late_since(list(late.values())) if straggler.kind == "emerging" else None
        first = straggler.first_step if since is None else max(straggler.first_step, list(late)[since])
        rows = slice(first, straggler.last_step + 1)
        lengths = [mean_of([row]) for row in self.accounts.lengths[rows]]
        return is_lasting(self.own_times[rows], lengths, straggler.rank)

    def _describe(self, straggler: Straggler) -> SlowRank:
        """Return when it was late, and by which part of the step: one part is disturbed less than all of them."""
        rank, accounts = straggler.rank, self.accounts
        first, last, kind = straggler.first_step, straggler.last_step, straggler.kind
        longer = {part: self.longer(rank, [part]) for part in _BUSY}

        def lost(part: str) -> float:
            seconds = [late for row, late in longer[part].items() if first <= row <= last]
            return fmean(seconds) if seconds else 0.0

        phase = max(_BUSY, key=lost)
        begin = late_since(list(longer[phase].values()))
        if begin is not None:
            rows = list(longer[phase])[begin:]
            first, last, kind = rows[0], rows[-1], "emerging"
        own = mean_of([[row[rank]] for row in accounts.busy()[first : last + 1]])
        slowdown = own / max(own - math.fsum(map(lost, _BUSY)), 1e-9)
        return SlowRank(rank, accounts.steps[first], accounts.steps[last], slowdown, kind, phase, lost(phase))


_BUSY = tuple(part for part in step_parts.ALL if part not in step_parts.WAITING)


def _total(step: Step, label: str) -> float:
    return math.fsum(span.seconds for span in step.spans if span.label == label)


def _launching(step: Step) -> float:
    """Return the seconds of a step in which buckets are launched, without reductions that run inside a launch."""
    launches = [span for span in step.spans if span.label == LAUNCH]
    inside = [span for span in step.spans if span.label == REDUCE and _is_in_any(span, launches)]
    return _total(step, LAUNCH) - math.fsum(span.seconds for span in inside)


def _is_in_any(inner: Span, launches: Sequence[Span]) -> bool:
    return any(span.start <= inner.start and inner.end <= span.end for span in launches)
