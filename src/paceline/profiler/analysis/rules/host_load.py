"""Ranks that have to share their cores with other programs, which explains much of what else looks like a fault."""

from __future__ import annotations

from paceline.profiler.analysis.metrics import Facts
from paceline.profiler.analysis.rules.gains import NON_COMPUTE, promise, spread
from paceline.profiler.report import step_parts
from paceline.profiler.report.report import Advice


def host_load(facts: Facts) -> Advice | None:
    """Advise to free the cores, where other programs keep them from the ranks and that explains all other parts."""
    load = facts.load
    if load is None or not load.is_heavy():
        return None
    # One rank without a core makes all others wait, so that waiting is longer than a rank's own delay.
    if any(load.share < facts.shares[part] / (2 if part in step_parts.WAITING else 1) for part in NON_COMPUTE):
        return None
    return promise(
        "host-load",
        "Profile again when the host is idle, or give the ranks cores of their own; under this load, advice on "
        "communication and on waiting in turns would not be sure",
        f"rank {load.rank} was ready to run and had no core for {load.share:.0%} of its time, with {load.switches:.0f} "
        f"involuntary context switches a second; other programs keep {load.others:.1f} of {load.cores} cores busy",
        spread(load.share, facts.shares, step_parts.ALL),
    )


def unexplained(share: float, facts: Facts) -> float:
    """Return what is left of the `share` of waiting that the load does not explain."""
    # A delay of either of two ranks makes the other wait.
    return share if facts.load is None else max(0.0, share - 2 * facts.load.share)
