"""Figures of a run, computed from the records of all ranks, for the advice, the page and the terminal.

Before the profiler gives advice, measurements must meet these conditions:

- At least :data:`ENOUGH` steps were measured.
- The cause takes at least a tenth of the time (:data:`NOTABLE`), or the change saves at least a twentieth
  (:data:`WORTH`).
- A single rank is blamed only if it was late throughout (:func:`is_lasting`), or if stack samples show the time that it
  lost (:func:`was_seen`). Other programs can slow a rank for about a second, which may be a hundred short steps in a
  row. The statistics therefore treat stretches of a second as independent, but not single steps.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean, median, median_low, stdev
from typing import Any

from paceline.core.spans import OUTER_STEP
from paceline.planner.critical_batch import NoiseScale, Norms, estimate
from paceline.planner.profiles import Profiled
from paceline.profiler import step_parts
from paceline.profiler.host_load import Load, load_of, neighbours
from paceline.profiler.operator_table import OperatorTable
from paceline.profiler.rank_file import RankRecord
from paceline.profiler.step_breakdown import (
    Accounts,
    BucketTimes,
    Steps,
    account,
    all_reduces,
    bucket_times,
    detailed_steps,
    gradient_times,
    mean_of,
    reduced_and_hidden,
    steps_by_number,
)
from paceline.profiler.stragglers import Straggler, find_stragglers

ENOUGH = 20
"""Minimum number of measured steps for a verdict, advice and shares of the time. In excerpts of healthy runs, the
profiler named a cause that the whole run did not have: in 13% of the 3-step excerpts, in 4% of the 10-step excerpts,
and never in 15 or more steps."""
NOTABLE, WORTH = 0.1, 0.05
"""Minimum share of the time to name a cause, and minimum saving to give advice."""
ONE_CAUSE, OTHER_TRAINING = 2.0, 0.5
"""Weights for ordering advice: for a change that removes a cause, and for a change to the training itself."""
SLOWDOWN = 1.15
"""Minimum ratio for a rank to count as slower than the others. Healthy ranks on one host differ by less, because ranks
that sleep in a collective wake late, and cores and caches differ."""
LATE, STEADY = 1.075, 1.4
"""Minimum ratio for a stretch to count as late, and the ratio that proves lateness if nine in ten steps reach it."""
MOSTLY = 0.9
"""Share of steps that counts as nearly all steps."""
STRETCH_S, STRETCHES = 1.0, 13
"""Minimum length of a stretch in seconds, and maximum number of stretches. A long profile has longer stretches, because
other programs may slow it for longer."""
CHANCE = 0.004
"""Largest p-value of the sign test. To pass, at least 8 of 8 or 12 of 13 stretches must be late."""
SEEN = 1 / 3
"""Minimum share of the time lost in a rank's own code that stack samples must account for. The share is low, because
samples are late on a busy host."""
FEWEST = 3
"""Minimum number of steps or samples needed to draw a conclusion."""
WAKE_S = 0.001
"""Seconds that it takes ranks on one host to wake each other. No rank is blamed for less."""
BLOCKS = 5
"""Number of consecutive blocks of steps whose medians show the drift of a run."""
LEAST_OWN = 0.1
"""Minimum share of a rank's own time that must remain after subtracting delays. If less remains, the delays occurred
while the rank waited."""
NOT_COMPUTING = tuple(part for part in step_parts.ALL if part not in step_parts.COMPUTE)
_BUSY = tuple(part for part in step_parts.ALL if part not in step_parts.WAITING)


def is_lasting(busy: Sequence[Sequence[float]], lengths: Sequence[float], rank: int) -> bool:
    """Return whether `rank` was late throughout these steps, not just for a while.

    Compares the rank with the median of the others. The rank was late throughout if it was far slower in nearly all
    steps (which must last at least one stretch), or if a sign test on the total time of each stretch rules out chance.

    Args:
        busy: seconds of computing in each step on each rank; NaN if missing.
        lengths: seconds of each step, including waiting.
        rank: the rank in question.
    """
    times = [
        (row[rank], usual, length)
        for row, length in zip(busy, lengths, strict=True)
        if not math.isnan(row[rank]) and (others := others_of(row, rank)) and (usual := median(others)) > 0
    ]
    shortest = max(STRETCH_S, math.fsum(length for _, _, length in times) / (STRETCHES + 1))
    stretches = late_count = 0
    own_seconds = usual = seconds = 0.0
    for own_time, usual_time, length in times:
        own_seconds, usual, seconds = own_seconds + own_time, usual + usual_time, seconds + length
        if seconds >= shortest:
            stretches, late_count = stretches + 1, late_count + (own_seconds > LATE * usual)
            own_seconds = usual = seconds = 0.0
    if not stretches:
        return False
    if sum(own_time >= STEADY * usual_time for own_time, usual_time, _ in times) >= MOSTLY * len(times):
        return True
    return sum(math.comb(stretches, count) for count in range(late_count, stretches + 1)) <= CHANCE * 2.0**stretches


def was_seen(sampled: Sequence[float], rank: int, lost: Sequence[float]) -> bool:
    """Return whether stack samples show that only `rank` lost this time in its own code.

    Args:
        sampled: sampled seconds of each rank in its own code.
        rank: the rank in question.
        lost: seconds that it lost in each step.
    """
    # Two steps may be due to chance, even if they are long.
    if sum(seconds > fmean(lost) for seconds in lost) < FEWEST:
        return False
    return sampled[rank] - max(others_of(sampled, rank)) >= SEEN * math.fsum(lost)


def steps_to_profile(length: float) -> int:
    """Return how many steps of `length` seconds to profile: at least :data:`ENOUGH`, and at least one full stretch."""
    return max(ENOUGH, 10 * math.ceil(STRETCH_S / length / 10))


def late_since(differences: Sequence[float]) -> int | None:
    """Return the index of the step at which a rank became late; None if it did not.

    From that step on, a share of at least :data:`MOSTLY` of the steps is late; of the earlier steps, at least the same
    share is not late. Seconds are compared, because ratios of short steps are noisy and would put the change too early.

    Args:
        differences: how many seconds longer than the others the rank took for each step.
    """
    # A step is late if its difference exceeds half of the median over the last eighth of the steps.
    border = median(differences[-(len(differences) // 8 + 1) :]) / 2 if differences else 0.0
    if border <= 0:
        return None
    # Find the suffix with the most evidence. Each step's evidence is clipped, so a spike counts like any late step.
    start, largest, evidence = 0, 0.0, 0.0
    for index in reversed(range(len(differences))):
        evidence += max(-border, min(border, differences[index] - border))
        if evidence > largest:
            start, largest = index, evidence
    is_late = [difference > border for difference in differences]
    late_count, early_count = sum(is_late[start:]), start - sum(is_late[:start])
    return start if start and late_count >= MOSTLY * len(is_late[start:]) and early_count >= MOSTLY * start else None


def others_of(row: Sequence[float], rank: int) -> list[float]:
    """Return the values of all ranks except `rank`, skipping missing values."""
    return [time for place, time in enumerate(row) if place != rank and not math.isnan(time)]


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
class OuterSteps:
    """The outer steps of LocalSGD or DiLoCo."""

    every: float
    """Number of measured steps per outer step."""
    wait_s: float
    """Mean seconds per step that a rank spends in outer steps."""
    exchange_s: float
    """The part of `wait_s` after the last rank has arrived."""


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

    @property
    def waiting(self) -> float:
        """Share of the step time that communication and bubbles take together."""
        return math.fsum(self.shares[part] for part in step_parts.WAITING)

    @cached_property
    def outer_steps(self) -> OuterSteps | None:
        """The outer steps; None if there were none."""
        waits = self.accounts.figures("outer_wait")
        count = sum(any(seconds > 0 for seconds in row) for row in waits)  # NaN is not larger than any number
        # The rank that arrives last waits only for the exchange.
        shortest = [[min(row)] for row in waits]
        return OuterSteps(len(waits) / count, mean_of(waits), mean_of(shortest)) if count else None

    @property
    def outer_share(self) -> float:
        """Share of the time that the exchange of outer steps takes."""
        return self.outer_steps.exchange_s / self.length if self.outer_steps else 0.0

    @property
    def outer_note(self) -> str:
        """A sentence about the outer steps; empty without them."""
        if (outer := self.outer_steps) is None:
            return ""
        return (
            f"Outer step: a wait of {ms(outer.wait_s * outer.every)} every {outer.every:.0f} steps, which is "
            f"{ms(outer.wait_s)} per step on average ({percent(outer.wait_s / self.length)}); communication and bubble "
            "include it."
        )

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
    def drawn(self) -> tuple[Steps, list[BucketTimes]] | None:
        """The step to draw, and its buckets: a step with an outer step if there is one, or else the typical step."""
        if outer := detailed_steps(self.records, OUTER_STEP):
            steps = outer[len(outer) // 2]
            return steps, bucket_times(steps, self.records[0].buckets)
        return None if self.typical is None else (self.detailed[self.typical], self.buckets[self.typical])

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


def plan_of(facts: Facts) -> Profiled | None:
    """Return the figures that ``paceline plan`` needs; None without a measured step, or with outer steps."""
    records, first = facts.records, facts.records[0]
    if not facts.accounts.steps or not first.parameters or facts.outer_steps:
        return None
    ranks, batches, hosts = len(records), round(facts.batches), len({record.host for record in records})
    backward_s, total = backward_seconds(facts), sum(nbytes for _, nbytes in first.parameters)
    if not backward_s or not total:
        return None
    # On a host without other load, a rank would also be busy while it now has no core.
    wanted_cores = [record.own_cores + share for record, share in zip(records, facts.delay_shares, strict=True)]
    # Unless gradients were seen to arrive: from the last parameter to the first, in a time proportional to their bytes.
    assumed = [(backward_s * nbytes / total, nbytes) for _, nbytes in reversed(first.parameters)]
    return Profiled(
        ranks=ranks,
        hosts=hosts,
        device=first.device,
        cores=neighbours(records, 0).cores,
        busy_cores=fmean(wanted_cores) if first.device == "cpu" else 0.0,
        samples=facts.rows / ranks if facts.rows else batches,
        micro_batches=batches,
        forward_s=_typical(facts, step_parts.FORWARD) / batches,
        layers=layers_of(facts, backward_s) or assumed,
        optimizer_s=_typical(facts, step_parts.OPTIMIZER),
        other_s=sum(map(facts.accounts.mean, (step_parts.DATA, step_parts.COLLECTOR, step_parts.OTHER))) / batches,
        communication_s=_typical(facts, step_parts.COMMUNICATION),
        bubble_s=_typical(facts, step_parts.BUBBLE),
        jitter=_jitter(facts),
        bucket_bytes=first.buckets,
        all_reduces=all_reduce_times(facts),
        reduces_in_backward=facts.reduces_in_backward and hosts == 1,
        critical_batch=facts.noise_scale.value if facts.noise_scale else None,
        spread=_spread([mean_of([row]) for row in facts.accounts.lengths]),
    )


def backward_seconds(facts: Facts) -> float:
    """Return the typical seconds of the backward pass of a micro-batch."""
    return _typical(facts, step_parts.BACKWARD) / round(facts.batches)


def _typical(facts: Facts, part: str) -> float:
    """Return the median over the steps of the mean seconds of a part over the ranks."""
    return median(mean_of([row]) for row in facts.accounts.parts[part])


def _spread(lengths: Sequence[float]) -> float:
    """Return the relative standard error of the median length of steps; 0 with too few steps."""
    size = len(lengths) // BLOCKS
    blocks = [median(lengths[size * block : size * (block + 1)]) for block in range(BLOCKS)] if size > 1 else []
    return stdev(blocks) / math.sqrt(BLOCKS) / median(lengths) if blocks else 0.0


def _jitter(facts: Facts) -> float:
    """Return the standard deviation of a rank's own time, relative to its median, as far as outliers do not count."""
    spread = []
    for column in zip(*facts.own_times, strict=True):
        times = [seconds for seconds in column if not math.isnan(seconds)]
        middle = median(times) if times else 0.0
        if middle > 0:
            # The median deviation of a normal distribution is 0.6745 standard deviations.
            spread.append(median(abs(seconds - middle) for seconds in times) / 0.6745 / middle)
    return fmean(spread) if spread else 0.0


def layers_of(facts: Facts, backward_s: float) -> list[tuple[float, int]]:
    """Return seconds of backward and bytes of each parameter, in the order in which the gradients arrived on rank 0.

    The wrapper lays out its buckets in this order. Empty if a gradient was not seen to arrive.
    """
    sizes = [nbytes for _, nbytes in facts.records[0].parameters]
    arrived = [] if facts.typical is None else gradient_times(facts.detailed[facts.typical][0])
    measured = sum(seconds for _, seconds in arrived)
    # A parameter without a gradient has no arrival time.
    if len(arrived) != len(sizes) or not measured:
        return []
    # Marks are numbered among all parameters, but the record lists only trained ones.
    places = {index: place for place, index in enumerate(sorted(index for index, _ in arrived))}
    return [(backward_s * seconds / measured, sizes[places[index]]) for index, seconds in arrived]


def all_reduce_times(facts: Facts) -> list[tuple[int, float]]:
    """Return bytes and median seconds of each bucket's all-reduce in launch order; empty if unknown."""
    sizes = facts.records[0].buckets
    steps = []
    for buckets in facts.buckets:
        ends = [max((end for end in bucket.finished if end is not None), default=None) for bucket in buckets]
        steps.append([end - begin for begin, end in all_reduces(buckets, ends)])
    if any(len(seconds) != len(sizes) for seconds in steps):
        return []
    return [(nbytes, median(seconds)) for nbytes, *seconds in zip(sizes, *steps, strict=True)] if steps else []


def ms(seconds: float) -> str:
    """Return a time as text, with three digits: ``12.3 ms``; from ten seconds on, ``12.3 s``."""
    value = 1e3 * seconds
    if value == 0 or abs(value) >= 10_000:
        return "0 ms" if value == 0 else f"{seconds:,.1f} s"
    return f"{value:,.0f} ms" if abs(value) >= 100 else f"{value:.1f} ms" if abs(value) >= 1 else f"{value:.2f} ms"


def percent(share: float) -> str:
    """Return a share as text: ``27%``; below ten percent with one more digit."""
    # From 0.0995 on, a share rounds to 10%.
    return f"{100 * share:.0f}%" if abs(share) >= 0.0995 else f"{100 * share:.1f}%"


def sentence(words: str) -> str:
    """Return `words` with a period, and capitalized unless they start with an identifier."""
    first = words.split(" ", 1)[0]
    # Do not capitalize an identifier such as bucket_cap_mb=5.
    if first.isalpha() and first.islower():
        words = words[:1].upper() + words[1:]
    return words if words.endswith((".", "!", "?", ":")) or not words else f"{words}."


def kind_name(kind: str) -> str:
    """Return the kind of a piece of advice as a heading: ``Data loading`` for ``data-loading``."""
    return kind.replace("-", " ").capitalize()
