"""Figures of a run, computed from the records of all ranks, for the rules, the page and the terminal."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean, median, median_low
from typing import Any

from paceline.planner.critical_batch import NoiseScale, Norms, estimate
from paceline.profiler.analysis.bucket_timeline import (
    BucketTimes,
    Steps,
    bucket_times,
    detailed_steps,
    reduced_and_hidden,
)
from paceline.profiler.analysis.confidence import ENOUGH, SLOWDOWN, WAKE_S, WORTH, is_lasting, late_since, others_of
from paceline.profiler.analysis.operator_table import OperatorTable
from paceline.profiler.analysis.step_breakdown import Accounts, account, mean_of, steps_by_number
from paceline.profiler.records.core_use import Load, load_of
from paceline.profiler.records.rank_file import RankRecord
from paceline.profiler.report import step_parts
from paceline.profiler.stragglers import Straggler, find_stragglers

LEAST_OWN = 0.1
"""Minimum share of a rank's own time that must remain after subtracting delays. If less remains, the delays occurred
while the rank waited."""

NOT_COMPUTING = tuple(part for part in step_parts.ALL if part not in step_parts.COMPUTE)
_BUSY = tuple(part for part in step_parts.ALL if part not in step_parts.WAITING)


def differences(table: Sequence[Sequence[float]], rank: int) -> dict[int, float]:
    """Return how far `rank` is above the median of the others, by row, skipping rows with missing values."""
    return {
        index: row[rank] - median(others)
        for index, row in enumerate(table)
        if (others := others_of(row, rank)) and not math.isnan(row[rank])
    }


@dataclass(frozen=True)
class SlowRank:
    """A rank that others waited for. See :func:`paceline.profiler.find_stragglers`."""

    rank: int
    first_step: int
    last_step: int
    slowdown: float
    """Its computing time divided by the median of the other ranks."""
    kind: str
    phase: str
    """Part of the step that lost the most time."""
    seconds: float
    """Seconds that this part lost per step."""


@dataclass(frozen=True)
class Facts:
    """Figures of one run, each computed on first use."""

    records: Sequence[RankRecord]
    operators: OperatorTable
    traces: Sequence[dict[str, Any]] = ()
    """Traces of torch's profiler, by rank; a missing trace is empty."""

    @cached_property
    def accounts(self) -> Accounts:
        """The measured steps."""
        return account(self.records)

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
        """Share of the step time that each part takes; zeros without steps."""
        return {part: self.accounts.mean(part) / self.length if self.length else 0.0 for part in step_parts.ALL}

    @cached_property
    def rank_parts(self) -> list[dict[str, float] | None]:
        """Mean seconds of each part, by rank; None if a rank took no step."""
        parts = self.accounts.parts.items()
        return [
            {part: mean_of([[row[rank]] for row in rows]) for part, rows in parts}
            if any(ranks[rank] for ranks in self.accounts.taken)
            else None
            for rank in range(len(self.records))
        ]

    @cached_property
    def mean_parts(self) -> dict[str, float]:
        """Mean seconds of each part, over all ranks that took steps."""
        rows = [parts for parts in self.rank_parts if parts is not None]
        return {part: fmean(row[part] for row in rows) if rows else 0.0 for part in step_parts.ALL}

    @cached_property
    def collecting(self) -> list[float]:
        """Seconds per step spent in Python's garbage collector, by rank."""
        return [mean_of([column]) for column in zip(*self.accounts.figures("collecting"), strict=True)]

    @property
    def waiting(self) -> float:
        """Share of the step time that communication and bubbles take together."""
        return math.fsum(self.shares[part] for part in step_parts.WAITING)

    def mean(self, name: str) -> float:
        """Return the mean of a figure over the measured steps, such as ``batches``; 0 without steps."""
        return mean_of(self.accounts.figures(name))

    @cached_property
    def batches(self) -> float:
        """Mean number of forward passes in a step."""
        return max(1.0, self.mean("batches"))

    @cached_property
    def rows(self) -> float | None:
        """Mean number of rows in a step, summed over all ranks."""
        sums = [math.fsum(row for row in rows if not math.isnan(row)) for rows in self.accounts.figures("rows")]
        return fmean(sums) if any(sums) else None

    @cached_property
    def detailed(self) -> list[Steps]:
        """The detailed steps that all ranks took."""
        return detailed_steps(self.records)

    @cached_property
    def noise_scale(self) -> NoiseScale | None:
        """The gradient noise scale; None if it was not measured."""
        steps: list[Norms] = []
        for ranks in steps_by_number(self.records).values():
            norms = [step.norms for step in ranks if step is not None and step.norms is not None]
            # The formulas assume equal shares of the batch, and a rank without samples has no norm.
            if len(norms) == len(self.records):
                rows = float(sum(step.rows for step in ranks if step))
                local, averaged = (fmean(column) for column in zip(*norms, strict=True))
                steps.append((local, averaged, rows, len(norms)))
        return estimate(steps)

    @cached_property
    def typical(self) -> int | None:
        """Index of the detailed step of median length; None without detailed steps."""
        lengths = [max(step.length for step in steps) for steps in self.detailed]
        return lengths.index(median_low(lengths)) if lengths else None

    @cached_property
    def buckets(self) -> list[list[BucketTimes]]:
        """The buckets of each detailed step."""
        return [bucket_times(steps, self.records[0].buckets) for steps in self.detailed]

    @cached_property
    def reductions(self) -> list[list[tuple[float, float] | None]]:
        """Seconds that all-reduces took, and how many were hidden behind computing, by detailed step and rank."""
        return [reduced_and_hidden(steps, times) for steps, times in zip(self.detailed, self.buckets, strict=True)]

    @cached_property
    def overlap(self) -> dict[int, float]:
        """Share of all-reduce time that overlaps with computing, by rank, where known.

        On a GPU it is computed from the kernels.
        """
        if self.operators.overlap:
            return dict(self.operators.overlap)
        overlaps = {}
        for rank in range(len(self.records)):
            times = [pair for ranks in self.reductions if (pair := ranks[rank]) is not None]
            if busy := math.fsum(busy for busy, _ in times):
                overlaps[rank] = math.fsum(hidden for _, hidden in times) / busy
        return overlaps

    @property
    def mean_overlap(self) -> float | None:
        """Mean overlap over the ranks; None if unknown."""
        return fmean(self.overlap.values()) if self.overlap else None

    @property
    def reduces_in_backward(self) -> bool:
        """Whether ranks reduce on the cores that also compute: through shared memory."""
        return any(record.wrapper == "paceline" and record.backend == "paceline" for record in self.records)

    @cached_property
    def all_reduce(self) -> float:
        """Seconds that all-reduces take in a step, at least as many as they add to its length."""
        shown = self.accounts.mean(step_parts.COMMUNICATION)
        ran = [[pair[0] for pair in ranks if pair is not None] for ranks in self.reductions]
        if self.reduces_in_backward or not any(ran):  # the parts of a step include the whole cost
            return shown
        return max(shown, median(fmean(busy) for busy in ran if busy))

    def all_reduce_share(self, times: float = 1.0) -> float:
        """Return all-reduce's share of the work if `times` as many batches were accumulated between all-reduces.

        Work is forward, backward, optimizer and all-reduce, without waiting for other ranks and for data.
        """
        computing = times * math.fsum(map(self.accounts.mean, step_parts.COMPUTE))
        work = computing + self.accounts.mean(step_parts.OPTIMIZER) + self.all_reduce
        return self.all_reduce / work if work else 0.0

    @cached_property
    def delay_shares(self) -> list[float]:
        """Share of its time during which each rank was ready to run but had no core."""
        # A rank may lack a core while it waits for others, and the clocks differ, so the delay may exceed the step.
        return [min(1.0, self.accounts.delay_of(rank) / self.length) for rank in range(len(self.records))]

    @cached_property
    def load(self) -> Load | None:
        """The load on the cores of the most delayed rank; None if unknown."""
        return load_of(self.records, self.delay_shares) if self.accounts.steps else None

    @property
    def is_loaded(self) -> bool:
        """Whether a rank lacked a core because of other programs or too many ranks."""
        return self.load is not None and (self.load.is_by_others or self.load.is_by_ranks)

    def is_explained_by_load(self, parts: Sequence[str] = NOT_COMPUTING) -> bool:
        """Return whether a lack of cores explains how long each of `parts` takes."""
        if self.load is None or not self.is_loaded:
            return False
        # One rank without a core makes all others wait, so the waiting is longer than that rank's delay.
        limits = [self.shares[part] / (2 if part in step_parts.WAITING else 1) for part in parts]
        return self.load.share >= max(limits)

    def longer(self, rank: int, part: str) -> dict[int, float]:
        """Return how much longer `part` takes on `rank` than on the others, by row of the accounts."""
        return differences(self.accounts.parts[part], rank)

    def delays(self, rank: int) -> dict[int, float]:
        """Return how much longer `rank` lacked a core than the others, by row; empty on a host without other load."""
        return differences(self.accounts.delayed, rank) if self.is_loaded else {}

    @cached_property
    def own_times(self) -> list[list[float]]:
        """Seconds that each rank spent on each step, excluding waiting and the time when others used its cores.

        On a host without other load, a rank that lacks a core was given too few, so its delay is included. NaN if
        hardly any time remains after subtracting delays.
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
        """Ranks that computed longer than the others and made them wait, beyond what chance explains."""
        if len(self.records) < 2 or not self.is_firm:
            return []
        slow = map(self._describe, find_stragglers(self.own_times, min_slowdown=SLOWDOWN))
        return [straggler for straggler in slow if self._is_notable(straggler)]

    def _is_notable(self, slow: SlowRank) -> bool:
        first, last = map(self.accounts.steps.index, (slow.first_step, slow.last_step))
        rows = slice(first, last + 1)
        lengths = [mean_of([row]) for row in self.accounts.lengths[rows]]
        is_worth_it = self.accounts.caused(slow.rank) > max(WORTH * self.length, WAKE_S)
        return is_worth_it and is_lasting(self.own_times[rows], lengths, slow.rank)

    def _describe(self, straggler: Straggler) -> SlowRank:
        """Describe when the rank was late, judged by the part that lost most, because the sum of parts is noisier."""
        rank, accounts = straggler.rank, self.accounts
        first, last, kind = straggler.first_step, straggler.last_step, straggler.kind
        longer = {part: self.longer(rank, part) for part in _BUSY}

        def lost(part: str) -> float:
            seconds = [delay for row, delay in longer[part].items() if first <= row <= last]
            return fmean(seconds) if seconds else 0.0

        phase = max(_BUSY, key=lost)
        # With ratios of short steps, the beginning would be found too early.
        begin = late_since(list(longer[phase].values()))
        if begin is not None:
            rows = list(longer[phase])[begin:]
            first, last, kind = rows[0], rows[-1], "emerging"
        busy = mean_of([[row[rank]] for row in accounts.busy()[first : last + 1]])
        slowdown = busy / max(busy - math.fsum(map(lost, _BUSY)), 1e-9)
        return SlowRank(rank, accounts.steps[first], accounts.steps[last], slowdown, kind, phase, lost(phase))
