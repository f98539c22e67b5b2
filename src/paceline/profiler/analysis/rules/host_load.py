"""Ranks that have to share their cores with other programs, which explains much of what else looks like a fault."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from paceline.profiler.analysis.metrics import Facts
from paceline.profiler.analysis.rules.gains import NON_COMPUTE, promise, spread
from paceline.profiler.analysis.rules.late_ranks import late_by_own_code
from paceline.profiler.analysis.step_breakdown import mean_of
from paceline.profiler.report import step_parts
from paceline.profiler.report.report import Advice

DELAYED, OTHERS = 0.1, 0.2
"""Share of its time that a rank has no core, and cores that other programs keep busy, from which load is a cause."""


@dataclass(frozen=True)
class Load:
    """The load on the hosts of a run."""

    share: float
    """Share of its time that the most delayed rank was ready to run and had no core."""
    rank: int
    others: float
    """Cores that other programs than the ranks and their workers kept busy, on its host."""
    cores: int
    switches: float
    """Involuntary context switches of the rank in a second."""


def load_of(facts: Facts) -> Load | None:
    """Return the load on the host of the most delayed rank; None where that is not known."""
    accounts, records = facts.accounts, facts.records
    if not accounts.steps or not facts.length:
        return None
    shares = [mean_of([[row[rank]] for row in accounts.delayed]) / facts.length for rank in range(len(records))]
    rank = max(range(len(records)), key=lambda rank: shares[rank])
    used: dict[str, float] = defaultdict(float)
    for record in records:
        used[record.host] += record.own_cores
    host, busy = records[rank].host, records[rank].busy_cores
    if busy is None:
        return None
    return Load(shares[rank], rank, max(0.0, busy - used[host]), records[rank].cores, records[rank].switches)


def explains(load: Load | None, facts: Facts) -> bool:
    """Return whether `load` explains all other parts, half of what waiting costs, or of one rank's delay.

    One rank without a core makes all others wait, so that waiting is longer than a rank's own delay.
    """
    if load is None or load.share < DELAYED or load.others < OTHERS:
        return False
    for slow in facts.stragglers:
        delayed = mean_of([[row[slow.rank]] for row in facts.accounts.delayed])
        if delayed < slow.seconds / 2 or facts.records[slow.rank].cores < max(r.cores for r in facts.records):
            return False
    own = late_by_own_code(facts)
    if own is not None and own.seconds > 2 * mean_of([[row[own.rank]] for row in facts.accounts.delayed]):
        return False
    return all(load.share >= facts.shares[part] / (2 if part in step_parts.WAITING else 1) for part in NON_COMPUTE)


def host_load(facts: Facts) -> Advice | None:
    """Advise to free the cores, where other programs keep them from the ranks."""
    load = load_of(facts)
    if load is None or not explains(load, facts):
        return None
    return promise(
        "host-load",
        "Profile again when the host is idle, or give the ranks cores of their own; under this load, no other advice "
        "would be sure",
        f"rank {load.rank} was ready to run and had no core for {load.share:.0%} of its time, with {load.switches:.0f} "
        f"involuntary context switches a second; other programs keep {load.others:.1f} of {load.cores} cores busy",
        spread(load.share, facts.shares, step_parts.ALL),
    )


def unexplained(share: float, facts: Facts) -> float:
    """Return what is left of the `share` of waiting that the load does not explain."""
    load = load_of(facts)
    # A delay of either of two ranks makes the other wait.
    return share if load is None else max(0.0, share - 2 * load.share)
