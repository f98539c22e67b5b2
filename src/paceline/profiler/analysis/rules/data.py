"""Detects loops that wait for their batches, and finds the number of workers that would help."""

from __future__ import annotations

import math
from statistics import fmean

from paceline.profiler.analysis.confidence import MOSTLY, NOTABLE
from paceline.profiler.analysis.facts import Facts
from paceline.profiler.analysis.rules.words import part_sentence
from paceline.profiler.records.core_use import OTHERS, neighbours
from paceline.profiler.report.advice import Advice
from paceline.profiler.report.step_parts import DATA

MOST_WORKERS = 8


def data_loading(facts: Facts) -> Advice | None:
    """Detect a loop that waits for its batches."""
    record, share = facts.records[0], facts.shares[DATA]
    if not record.workers:
        share = _own_loading(facts) / facts.length
    if share < NOTABLE:
        return None
    reason = f"the loop waits {share * facts.length * 1e3:.1f} ms per step for its batch, {share:.0%} of the time"
    batch, is_waiting = _batch(facts)
    count, then = _workers_and_step(facts, batch, is_waiting)
    saved = min(share, 1 - then / facts.length)
    if count <= record.workers or (saved < NOTABLE and not is_waiting):
        return _cheaper(facts, reason, is_waiting)
    how = f"give the DataLoader num_workers={count}{f' instead of {record.workers}' if record.workers else ''}"
    if count > record.cores:
        how += " (more than there are cores, because they mostly wait; torch warns about it)"
    return _advice(facts, f"Load data in parallel with training: {how}, or do less work per sample", reason, saved)


def _advice(facts: Facts, text: str, reason: str, gain: float) -> Advice:
    return Advice("data-loading", text, reason, gain, part_sentence(facts, DATA))


def _cheaper(facts: Facts, reason: str, is_waiting: bool) -> Advice:
    """Return advice for data loading that would not be faster with more workers."""
    text = "Make loading cheaper: cache what it computes, or do less work per sample"
    if not is_waiting:
        group, others = neighbours(facts.records, 0), 0.0 if facts.load is None else facts.load.others
        workers = "more workers" if facts.records[0].workers else "workers"
        ranks = "the rank computes" if len(group.records) == 1 else f"{len(group.records)} ranks compute"
        text += f"; {workers} would not help, because loading is computation, and no core is free for it"
        reason += f"; {ranks} on {group.cores:g} cores"
        reason += f", and other programs keep {others:.1f} of them busy" if others >= OTHERS else ""
    return _advice(facts, text, reason, facts.shares[DATA] / 2)


def _batch(facts: Facts) -> tuple[float, bool]:
    """Return the seconds that a worker needs for a batch, and whether it mostly waits, which takes no core."""
    record = facts.records[0]
    if record.workers:  # workers are always busy, because the loop waits for them
        wall = facts.length * record.workers
        cpu = fmean(max(0.0, item.own_cores - item.loop_cores) for item in facts.records) * facts.length
        is_starved = (record.busy_cores or 0.0) > MOSTLY * neighbours(facts.records, 0).cores
    else:
        wall, cpu, is_starved = _own_loading(facts), facts.mean("loading"), False
    # If the system does not report the thread's CPU time, assume that it ran whenever it was not delayed.
    delay = _delay(facts) / facts.length
    ran = fmean(item.loop_cores for item in facts.records) or 1 - delay
    # Loading that computes is delayed as much as the rest of the step.
    is_waiting = not is_starved and min(cpu, wall) * (1 + delay / max(ran, 1e-3)) < wall / 2
    return wall if is_waiting else cpu, is_waiting


def _own_loading(facts: Facts) -> float:
    """Return the seconds per step that the loop needs for its batches, without those when it may have had no core."""
    return max(facts.mean("loading"), facts.accounts.mean(DATA) - _delay(facts))


def _delay(facts: Facts) -> float:
    return fmean(facts.accounts.delay_of(rank) for rank in range(len(facts.records)))


def _workers_and_step(facts: Facts, batch: float, is_waiting: bool) -> tuple[int, float]:
    """Return how many workers per rank keep up with the training, and the resulting seconds per step."""
    group, busy = neighbours(facts.records, 0), facts.records[0].busy_cores or 0.0
    rest = max(facts.length - facts.accounts.mean(DATA), 1e-6)
    wanted = min(MOST_WORKERS, math.ceil(batch / rest) + 1)
    # Workers that wait need no free core.
    free = wanted if is_waiting else math.floor(max(0.0, group.cores - busy) / len(group.records))
    count = min(wanted, free)
    return count, max(rest, batch / count) if count else facts.length
