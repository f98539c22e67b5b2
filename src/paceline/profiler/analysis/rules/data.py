"""A loop that waits for its batches: whether workers would load them beside it, and how many."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import fmean

from paceline.profiler.analysis.metrics import Facts
from paceline.profiler.analysis.rules.gains import promise
from paceline.profiler.analysis.rules.late_ranks import BEFORE_FORWARD, function_of_own_code, late_by_own_code
from paceline.profiler.records.core_use import OTHERS, neighbours
from paceline.profiler.report import step_parts
from paceline.profiler.report.report import Advice

NOTABLE = 0.1
"""Share of the time that waiting for data takes, and that workers save, from which it is told."""
MOST_WORKERS = 8
_NO_REST, _STARVED = 0.95, 5.0
"""Share of the cores that are busy from which workers, too, may lack one, and the times as long that they may take."""
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
    # Without a loader this may be one rank's own code, of which another rule tells.
    if share < NOTABLE or (not facts.has_loader and late_by_own_code(facts)):
        return None
    spent = f"{share * facts.length * 1e3:.1f} ms of a step"
    reason = f"the loop waits {spent} for its batch, {share:.0%}"
    if not facts.has_loader:
        reason = f"{spent}, {share:.0%}, go by {BEFORE_FORWARD}"
        reason += f", much of it in {function}" if (function := function_of_own_code(facts)) else ""
    loading = loading_of(facts)
    count, then = workers_and_step(facts, loading)
    saved = min(share, 1 - then / facts.length)
    if count <= record.workers or (saved < NOTABLE and not loading.is_waiting):
        return _cheaper(facts, loading, reason)
    if record.workers:
        how = f"give the DataLoader num_workers={count} in place of {record.workers}"
    elif facts.has_loader:
        how = f"give the DataLoader num_workers={count}"
    else:
        how = f"if it loads batches, do so in a DataLoader with num_workers={count}"
    if count > record.cores:
        how += ", more than there are cores, because they wait most of the time (torch warns of it)"
    place = "Load data beside the training" if facts.has_loader else f"Look at the work {BEFORE_FORWARD}"
    return promise(
        "data-loading",
        f"{place}: {how}, or do less work on a sample",
        reason,
        {step_parts.DATA: saved},
        trial={"num_workers": count} if facts.has_loader else None,
    )


def _cheaper(facts: Facts, loading: Loading, reason: str) -> Advice:
    """Advise on loading for which more workers are of no use."""
    text, record = "Make a batch cheaper: cache what loading computes, or do less work on a sample", facts.records[0]
    if not facts.has_loader:
        text = f"Look at the work {BEFORE_FORWARD}: cache what it computes, or do it less often"
    if not loading.is_waiting:
        there, others = neighbours(facts.records, 0), 0.0 if facts.load is None else facts.load.others
        workers = "more workers" if record.workers else "workers"
        ranks = "the rank computes" if len(there.records) == 1 else f"{len(there.records)} ranks compute"
        text += f"; {workers} would not help, because loading computes, and no core is free for it"
        reason += f"; {ranks} on {there.cores:g} cores"
        reason += f", and other programs keep {others:.1f} of them busy" if others >= OTHERS else ""
    return promise("data-loading", text, reason, {step_parts.DATA: CHEAPER * facts.shares[step_parts.DATA]})


def loading_of(facts: Facts) -> Loading:
    """Return what a batch takes: all of the time, on a core, and waiting."""
    record, length, data = facts.records[0], facts.length, facts.accounts.mean(step_parts.DATA)
    stretch = _stretch(facts)
    if record.workers:  # the loop waits for them, so they work all the time
        worked = fmean(max(0.0, one.own_cores - one.loop_cores) for one in facts.records) * length
        wall, cpu = length * record.workers, worked
        if (record.busy_cores or 0.0) > _NO_REST * neighbours(facts.records, 0).cores:
            stretch = max(stretch, _STARVED)
    elif record.loaders_seen:
        wall, cpu = data, fmean(step.loading for one in facts.records for step in one.steps if step.is_measured())
    else:  # what the loop's thread did beside the rest of the step
        parts = [part for part in step_parts.ALL if part not in (*step_parts.WAITING, step_parts.DATA)]
        computing = math.fsum(map(facts.accounts.mean, parts)) / stretch
        wall, cpu = data, max(0.0, fmean(one.loop_cores for one in facts.records) * length - computing)
    cpu = min(cpu, wall)
    # What computes lacks a core as often here as elsewhere in the step.
    return Loading(wall, cpu, max(0.0, wall - cpu * stretch))


def _stretch(facts: Facts) -> float:
    """Return the time that computing takes by what it would take with a core for itself."""
    delay = fmean(facts.accounts.delay_of(rank) for rank in range(len(facts.records))) / facts.length
    # Where the system does not tell how long the thread ran, it is taken to have run whenever it was not delayed.
    ran = fmean(one.loop_cores for one in facts.records) or 1 - delay
    return 1 + delay / max(ran, 1e-3)


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
    work = math.fsum(one.own_cores for one in there.records) * facts.length
    step = max(rest, work / max(left, 1e-6))
    batch = loading.wall if loading.is_waiting else loading.cpu
    count = max(record.workers, math.ceil(batch / step))
    free = left - (work - ranks * loading.cpu) / step - ranks * count
    if loading.is_waiting or free >= ranks:
        count += 1
    count = min(MOST_WORKERS, count)
    return count, max(step, batch / count)
