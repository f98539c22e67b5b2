"""Ranks that have to share their cores, with other programs or each other: much else then looks like a fault."""

from __future__ import annotations

import math
from collections.abc import Iterable

from paceline.core.output.wording import counted
from paceline.profiler.analysis.metrics import Facts
from paceline.profiler.analysis.rules.gains import NON_COMPUTE, promise, spread
from paceline.profiler.records.core_use import Neighbours, neighbours
from paceline.profiler.report import step_parts
from paceline.profiler.report.report import Advice


def is_explained(facts: Facts) -> bool:
    """Return whether ranks lack cores, and that explains all that a step waits for."""
    return explains(facts, NON_COMPUTE)


def explains(facts: Facts, parts: Iterable[str]) -> bool:
    """Return whether ranks lack cores, and that explains how long each of `parts` is."""
    load = facts.load
    if load is None or not facts.is_loaded:
        return False
    # One rank without a core makes all others wait, so that waiting is longer than a rank's own delay.
    return all(load.share >= facts.shares[part] / (2 if part in step_parts.WAITING else 1) for part in parts)


def lack_of_cores(facts: Facts) -> list[Advice]:
    """Return the advice on what keeps ranks from cores, where that explains all other parts."""
    if facts.load is None or not is_explained(facts):
        return []
    found = [threads(facts) if facts.load.is_by_ranks() else None, host_load(facts)]
    return [one for one in found if one is not None]


def host_load(facts: Facts) -> Advice | None:
    """Advise to free the cores, where other programs keep them from the ranks."""
    load = facts.load
    if load is None or not load.is_by_others():
        return None
    return promise(
        "host-load",
        "Profile again when the host is idle, or give the ranks cores of their own; under this load, advice on "
        "communication and on waiting in turns would not be sure",
        f"rank {load.rank} was ready to run and had no core for {load.of_others:.0%} of its time because of other "
        f"programs, which keep {load.others:.1f} of {load.neighbours.cores:g} cores busy; it had "
        f"{load.switches:.0f} involuntary context switches a second",
        spread(load.of_others, facts.shares, step_parts.ALL),
    )


def threads(facts: Facts) -> Advice | None:
    """Advise on ranks that have more threads together than there are cores for them."""
    crowded = [found for rank in range(len(facts.records)) if (found := neighbours(facts.records, rank)).is_crowded]
    is_seen = facts.load is not None and facts.load.is_by_ranks()
    # Beside GPUs threads mostly sleep, so their number alone says nothing.
    if not crowded or (facts.records[0].device != "cpu" and not is_seen):
        return None
    there = max(crowded, key=lambda found: found.threads / found.cores)
    ranks, room = len(there.records), max(1, math.floor(there.cores))
    reason = there.description()
    if facts.load is not None and is_seen:
        reason += (
            f"; rank {facts.load.rank} was ready to run and had no core for {facts.load.of_ranks:.0%} of its time "
            "because of the other threads of these ranks"
        )
    if ranks > room:
        text = f"Start {counted(room, 'rank')} on these cores, with the batches of all {ranks}"
        if any(record.threads > 1 for record in there.records):
            text += ", and OMP_NUM_THREADS=1"
        return promise("threads", text, reason, _saved_by_fewer(facts, there))
    # A cautious estimate: threads that take turns lose time at the barriers of every operator.
    over = 1 - there.cores / there.threads
    return promise(
        "threads",
        f"Give each rank fewer threads: OMP_NUM_THREADS={room // ranks}, which paceline run sets if you do not; --pin "
        "keeps each rank to cores of its own",
        reason,
        {part: over * facts.shares[part] / 4 for part in step_parts.COMPUTE},
    )


def _saved_by_fewer(facts: Facts, there: Neighbours) -> dict[str, float]:
    """Return what a step loses if there are as many ranks as cores, which take the samples of all."""
    if facts.load is None:
        return {}
    # The same work on a sample, on the same cores, without a rest; but buckets and optimizer of fewer ranks.
    own = math.fsum(record.own_cores for record in there.records)
    work = own / max(there.cores - facts.load.others, 1e-6)
    once = facts.bucket_work / facts.length + facts.shares[step_parts.OPTIMIZER]
    spared = min(1.0, once * len(there.records) / max(own, 1e-6)) * (1 - there.cores / len(there.records))
    gain = max(0.0, 1 - min(1.0, work) * (1 - spared))
    return spread(gain, facts.shares, [*step_parts.WAITING, *step_parts.ALL])


def unexplained(share: float, facts: Facts) -> float:
    """Return what is left of the `share` of waiting that the load does not explain."""
    # A delay of either of two ranks makes the other wait.
    return share if facts.load is None else max(0.0, share - 2 * facts.load.share)
