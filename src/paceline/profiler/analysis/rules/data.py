"""A loop that waits for its batches: whether workers would load them beside it, and how many."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import fmean

from paceline.profiler.analysis.metrics import Facts
from paceline.profiler.analysis.rules.gains import promise
from paceline.profiler.records.core_use import neighbours
from paceline.profiler.report import step_parts
from paceline.profiler.report.report import Advice

NOTABLE = 0.1
"""Share of the time that waiting for data takes, and that workers save, from which it is told."""
MOST_WORKERS = 8
CHEAPER = 0.5
"""Share of the cost of loading that is predicted to go where only cheaper loading helps."""


@dataclass(frozen=True)
class Loading:
    """The batch of a step on a rank, in seconds."""

    wall: float
    """Seconds that a batch takes the loop, or a worker."""
    cpu: float
    """Seconds of a core in it."""
    waits: float
    """Seconds in which it waits for something else than a core, such as a disk."""

    @property
    def is_waiting(self) -> bool:
        """Whether most of it is waiting, which needs no core."""
        return self.waits >= self.wall / 2


def data_loading(facts: Facts) -> Advice | None:
    """Advise on a loop that waits for its batches."""
    share, record = facts.shares[step_parts.DATA], facts.records[0]
    if share < NOTABLE:
        return None
    reason = f"the loop waits {share * facts.length * 1e3:.1f} ms of a step for its batch, {share:.0%}"
    loading = loading_of(facts)
    count, then = workers_and_step(facts, loading)
    saved = min(share, 1 - then / facts.length)
    if saved < NOTABLE and not loading.is_waiting:
        return promise(
            "data-loading",
            "Make a batch cheaper: cache what loading computes, or do less work on a sample; "
            f"{'more workers' if record.workers else 'workers'} would not help, because no core is free for them",
            f"{reason}; {loading.cpu / loading.wall:.0%} of that is computing, which other processes could only do "
            f"where {_takers(facts)}",
            {step_parts.DATA: CHEAPER * share},
        )
    if record.workers:
        how = f"give the DataLoader num_workers={count} in place of {record.workers}"
    elif any(record.loaders_seen for record in facts.records):
        how = f"give the DataLoader num_workers={count}"
    else:
        how = f"load batches in a DataLoader with num_workers={count}"
    if count > record.cores:
        how += ", more than there are cores, because they wait most of the time (torch warns of it)"
    return promise(
        "data-loading",
        f"Load data beside the training: {how}, or do less work on a sample",
        reason,
        {step_parts.DATA: saved},
        trial={"num_workers": count},
    )


def _takers(facts: Facts) -> str:
    there = neighbours(facts.records, 0)
    ranks = "the rank computes" if len(there.records) == 1 else f"{len(there.records)} ranks compute"
    others = (
        f", and other programs keep {facts.load.others:.1f}" if facts.load is not None and facts.load.others else ""
    )
    return f"{ranks} on {there.cores:g} cores{others}"


def loading_of(facts: Facts) -> Loading:
    """Return what a batch takes: all of the time, on a core, and waiting."""
    record, length, data = facts.records[0], facts.length, facts.accounts.mean(step_parts.DATA)
    if record.workers:  # the loop waits for them, so they work all the time
        worked = fmean(max(0.0, one.own_cores - one.loop_cores) for one in facts.records) * length
        wall, cpu = length * record.workers, worked
    elif record.loaders_seen:
        wall, cpu = data, fmean(step.loading for one in facts.records for step in one.steps if step.is_measured())
    else:  # what the loop's thread did beside the rest of the step
        ran = fmean(one.loop_cores for one in facts.records) * length
        wall, cpu = data, max(0.0, ran - _computing(facts))
    cpu = min(cpu, wall)
    # What computes lacks a core as often here as elsewhere in the step.
    return Loading(wall, cpu, max(0.0, wall - cpu * _stretch(facts)))


def _stretch(facts: Facts) -> float:
    """Return the time that computing takes by what it would take with a core for itself."""
    delay = fmean(facts.accounts.delay_of(rank) for rank in range(len(facts.records))) / facts.length
    ran = fmean(one.loop_cores for one in facts.records) or 1 - delay
    return 1 + delay / max(ran, 1e-3)


def _computing(facts: Facts) -> float:
    """Return the seconds of a core that a rank takes in a step, without its batch."""
    parts = [part for part in step_parts.ALL if part not in (*step_parts.WAITING, step_parts.DATA)]
    return math.fsum(facts.accounts.mean(part) for part in parts) / _stretch(facts)


def workers_and_step(facts: Facts, loading: Loading) -> tuple[int, float]:
    """Return the workers of a rank that keep up with the training, and the seconds of a step then.

    A step is as long as the rest of it, as its batch takes a worker by their number, or as all work of the ranks takes
    on the cores that others leave to them. Batches that mostly wait need no free core, and have a worker to spare.
    """
    record, there = facts.records[0], neighbours(facts.records, 0)
    rest = max(facts.length - facts.accounts.mean(step_parts.DATA), 1e-6)
    ranks, others = len(there.records), 0.0 if facts.load is None else facts.load.others
    left = there.cores - others
    if loading.is_waiting:  # then others take no more than their turn
        left = max(left, there.cores * ranks / (ranks + math.ceil(others)))
    on_cores = ranks * (_computing(facts) + loading.cpu) / max(left, 1e-6)
    batch = loading.wall if loading.is_waiting else loading.cpu
    step = max(rest, on_cores)
    count = max(record.workers, math.ceil(batch / step))
    free = left - ranks * (_computing(facts) / step + count)
    if loading.is_waiting or free >= ranks:
        count += 1
    count = min(MOST_WORKERS, count)
    return count, max(step, batch / count)
