"""Ranks that share their cores with other programs or with each other, which can be mistaken for another problem."""

from __future__ import annotations

import math

from paceline.core.output.wording import counted
from paceline.profiler.analysis.confidence import ONE_CAUSE
from paceline.profiler.analysis.facts import Facts
from paceline.profiler.records.core_use import Load, neighbours
from paceline.profiler.report.advice import Advice
from paceline.profiler.report.step_parts import COMPUTE


def host_load(facts: Facts) -> Advice | None:
    """Detect other programs that take cores away from the ranks."""
    load = facts.load
    if load is None or not load.is_by_others:
        return None
    return Advice(
        "host-load",
        "Profile again when the host is idle, or give the ranks cores of their own; under this load, advice on "
        "communication and on waiting in turns would be unreliable",
        f"rank {load.rank} was ready to run but had no core for {load.of_others:.0%} of its time because of other "
        f"programs, which keep {load.others:.1f} of {load.neighbours.cores:g} cores busy",
        load.of_others,
    )


def threads(facts: Facts) -> Advice | None:
    """Detect ranks that together have more threads than cores."""
    crowded = [group for rank in range(len(facts.records)) if (group := neighbours(facts.records, rank)).is_crowded]
    load = facts.load if facts.load is not None and facts.load.is_by_ranks else None
    # With GPUs, threads mostly sleep, so their number alone is not a problem.
    if not crowded or (facts.records[0].device != "cpu" and load is None):
        return None
    crowd = max(crowded, key=lambda group: group.threads / group.cores)
    ranks, room = len(crowd.records), max(1, math.floor(crowd.cores))
    reason = crowd.description()
    if load is not None:
        reason += (
            f"; rank {load.rank} was ready to run but had no core for {load.of_ranks:.0%} of its time because of the "
            "other threads of these ranks"
        )
    if ranks > room:
        text = f"Start {counted(room, 'rank')} on these cores, with the batches of all {ranks}"
        if any(record.threads > 1 for record in crowd.records):
            text += ", and OMP_NUM_THREADS=1"
        idle = 0.0
        if facts.load is not None:  # the same work on the same cores, without idle time
            free = max(crowd.cores - facts.load.others, 1e-6)
            idle = max(0.0, 1 - math.fsum(record.own_cores for record in crowd.records) / free)
        return Advice("threads", text, reason, idle, weight=ONE_CAUSE)
    return Advice(
        "threads",
        f"Give each rank fewer threads: OMP_NUM_THREADS={room // ranks}, which paceline run sets if you do not",
        reason,
        # A conservative estimate of the time that threads sharing a core lose at the barriers of every operator.
        (1 - crowd.cores / crowd.threads) * math.fsum(facts.shares[part] for part in COMPUTE) / 4,
        weight=ONE_CAUSE,
    )


def lack_of_cores(load: Load) -> str:
    """Return a sentence that explains why the most delayed rank lacked cores."""
    lacked = f"rank {load.rank} was ready to run but had no core for {load.share:.0%} of its time."
    others, crowd = "other programs slow the ranks down", load.neighbours.description()
    if not load.is_by_ranks:
        return f"{others}: {lacked}"
    if not load.is_by_others:
        return f"the ranks slow each other down: {crowd}, and {lacked}"
    return f"{others}, and the ranks slow each other down, because {crowd}: {lacked}"
