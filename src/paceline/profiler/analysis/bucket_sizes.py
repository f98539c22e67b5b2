"""Simulates other bucket sizes, using the recorded arrival times of a run's gradients."""

from __future__ import annotations

from dataclasses import replace

from paceline.ddp.options.config import capacities
from paceline.planner.predictions import BUCKETS_MIB
from paceline.planner.profiles import fit
from paceline.planner.simulation import backward_timeline
from paceline.planner.workload import Layer, Workload
from paceline.profiler.analysis.confidence import WORTH
from paceline.profiler.analysis.facts import Facts
from paceline.profiler.analysis.plan import all_reduce_times, backward_seconds, layers_of


def best_capacity(facts: Facts) -> tuple[float, float] | None:
    """Return the ``bucket_cap_mb`` that would overlap best and the seconds that it saves; None if the gain is small."""
    times = all_reduce_times(facts)
    layers = layers_of(facts, backward_seconds(facts)) if times and facts.accounts.steps else []
    if not sum(seconds for seconds, _ in layers):
        return None
    work, (message, byte) = Workload(0.0, [Layer(*layer) for layer in layers], 1.0), fit(times)

    def exposed(sizes: tuple[int, ...]) -> float:
        """Return the seconds of communication after backward with buckets of these capacities."""
        return backward_timeline(replace(work, bucket_bytes=sizes), lambda nbytes: message + byte * nbytes).exposed

    best = min((exposed(capacities(size, None)), size) for size in BUCKETS_MIB)
    # Capacities equal to the buckets' sizes reproduce the buckets.
    saved = exposed(tuple(nbytes for nbytes, _ in times if nbytes)) - best[0]
    return (best[1], saved) if saved > WORTH * facts.length else None
