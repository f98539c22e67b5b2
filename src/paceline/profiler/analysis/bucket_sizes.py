"""Simulates other bucket sizes, using the recorded arrival times of a run's gradients."""

from __future__ import annotations

from dataclasses import replace

from paceline.ddp.options.config import capacities
from paceline.planner.predictions import BUCKETS_MIB
from paceline.planner.profiles import fit
from paceline.planner.simulation import backward_timeline
from paceline.profiler.analysis.confidence import WORTH
from paceline.profiler.analysis.facts import Facts
from paceline.profiler.analysis.plan import layers_of, plan_of


def best_capacity(facts: Facts) -> tuple[float, float] | None:
    """Return the ``bucket_cap_mb`` that would overlap best and the seconds that it saves; None if the gain is small."""
    plan = plan_of(facts)
    if plan is None or not plan.all_reduces or not layers_of(facts, 1.0):
        return None
    work, (message, byte) = plan.workload, fit(plan.all_reduces)

    def exposed(sizes: tuple[int, ...]) -> float:
        """Return the seconds of communication after backward with buckets of these capacities."""
        return backward_timeline(replace(work, bucket_bytes=sizes), lambda nbytes: message + byte * nbytes).exposed

    best = min((exposed(capacities(size, None)), size) for size in BUCKETS_MIB)
    saved = exposed(work.bucket_bytes) - best[0]
    return (best[1], saved) if saved > WORTH * facts.length else None
