"""Ranks that have to share their cores, with other programs or each other: much else then looks like a fault."""

from __future__ import annotations

import math
from collections.abc import Iterable

from paceline.core.output.wording import counted
from paceline.profiler.analysis.facts import Facts
from paceline.profiler.analysis.rules.finding import ONE_CAUSE, Finding, spread
from paceline.profiler.records.core_use import Load, neighbours
from paceline.profiler.report import step_parts

NON_COMPUTE = tuple(part for part in step_parts.ALL if part not in step_parts.COMPUTE)


def explains(facts: Facts, parts: Iterable[str] = NON_COMPUTE) -> bool:
    """Return whether ranks lack cores, and that explains how long each of `parts` is."""
    load = facts.load
    if load is None or not facts.is_loaded:
        return False
    # One rank without a core makes all others wait, so that waiting is longer than a rank's own delay.
    return all(load.share >= facts.shares[part] / (2 if part in step_parts.WAITING else 1) for part in parts)


def host_load(facts: Facts) -> Finding | None:
    """Find other programs that keep cores from the ranks."""
    load = facts.load
    if load is None or not load.is_by_others():
        return None
    return Finding(
        "host-load",
        "Profile again when the host is idle, or give the ranks cores of their own; under this load, advice on "
        "communication and on waiting in turns would not be sure",
        f"rank {load.rank} was ready to run and had no core for {load.of_others:.0%} of its time because of other "
        f"programs, which keep {load.others:.1f} of {load.neighbours.cores:g} cores busy",
        spread(load.of_others, facts.shares, step_parts.ALL),
    )


def threads(facts: Facts) -> Finding | None:
    """Find ranks that have more threads together than there are cores for them."""
    crowded = [found for rank in range(len(facts.records)) if (found := neighbours(facts.records, rank)).is_crowded]
    load = facts.load if facts.load is not None and facts.load.is_by_ranks() else None
    # Beside GPUs threads mostly sleep, so their number alone says nothing.
    if not crowded or (facts.records[0].device != "cpu" and load is None):
        return None
    there = max(crowded, key=lambda found: found.threads / found.cores)
    ranks, room = len(there.records), max(1, math.floor(there.cores))
    reason = there.description()
    if load is not None:
        reason += (
            f"; rank {load.rank} was ready to run and had no core for {load.of_ranks:.0%} of its time because of the "
            "other threads of these ranks"
        )
    if ranks > room:
        text = f"Start {counted(room, 'rank')} on these cores, with the batches of all {ranks}"
        if any(record.threads > 1 for record in there.records):
            text += ", and OMP_NUM_THREADS=1"
        idle = 0.0
        if facts.load is not None:  # the same work on the same cores, without a rest
            left = max(there.cores - facts.load.others, 1e-6)
            idle = max(0.0, 1 - math.fsum(record.own_cores for record in there.records) / left)
        saved = spread(idle, facts.shares, [*step_parts.WAITING, *step_parts.ALL])
        return Finding("threads", text, reason, saved, weight=ONE_CAUSE)
    # A cautious estimate: threads that take turns lose time at the barriers of every operator.
    over = 1 - there.cores / there.threads
    return Finding(
        "threads",
        f"Give each rank fewer threads: OMP_NUM_THREADS={room // ranks}, which paceline run sets if you do not; --pin "
        "keeps each rank to cores of its own",
        reason,
        {part: over * facts.shares[part] / 4 for part in step_parts.COMPUTE},
        weight=ONE_CAUSE,
    )


def lack_of_cores(load: Load) -> str:
    """Say who keeps the most delayed rank from its cores."""
    lacked = f"rank {load.rank} was ready to run and had no core for"
    crowd = load.neighbours.description()
    if not load.is_by_ranks():
        return f"other programs hold the ranks up: {lacked} {load.share:.0%} of its time."
    if not load.is_by_others():
        return f"the ranks hold each other up: {crowd}, and {lacked} {load.share:.0%} of its time."
    return (
        f"other programs hold the ranks up, and these each other: {lacked} {load.of_others:.0%} of its time because of "
        f"other programs, and for {load.of_ranks:.0%} because {crowd}."
    )
