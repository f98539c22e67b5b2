"""Exposed communication."""

from __future__ import annotations

from dataclasses import replace

from paceline.ddp.options.config import capacities
from paceline.planner.predictions import BUCKETS_MIB
from paceline.planner.profiles import fit
from paceline.planner.simulation import backward_timeline
from paceline.planner.workload import Layer, Workload
from paceline.profiler.analysis.confidence import NOTABLE, OTHER_TRAINING
from paceline.profiler.analysis.facts import Facts
from paceline.profiler.analysis.plan import all_reduce_times, backward_seconds, layers_of
from paceline.profiler.analysis.rules.words import part_sentence
from paceline.profiler.report.advice import Advice
from paceline.profiler.report.step_parts import COMMUNICATION, OPTIMIZER

ACCUMULATED, TIMES = (2, 4, 8), 4
"""Accumulation factors for the predictions of all-reduce's share, and the factor to recommend."""


def accumulation(facts: Facts) -> Advice | None:
    """Detect communication that backward does not hide."""
    share, averages = facts.shares[COMMUNICATION], facts.mean("averages")
    if len(facts.records) < 2 or share < NOTABLE:
        return None
    headline = part_sentence(facts, COMMUNICATION)
    if averages > 3 / 2:
        return Advice(
            "accumulation",
            f"Average gradients once per step, not {averages:.0f} times: model.no_sync() around every forward and "
            f"backward but the last, or paceline.accumulate(model, batches, every={averages:.0f})",
            f"communication costs {share:.0%} of a step, because each of its {averages:.0f} backward passes "
            "averages all gradients",
            share * (1 - 1 / averages),
            headline,
        )
    predictions = {str(times): facts.all_reduce_share(times) for times in ACCUMULATED}
    then = ", ".join(f"{predicted:.0%} at {times}" for times, predicted in predictions.items())
    every = f"{facts.batches * TIMES:.0f}"
    many = every if facts.batches == 1 else f"{every} instead of {facts.batches:.0f}"
    return Advice(
        "accumulation",
        f"Accumulate {many} batches between optimizer steps: paceline.accumulate(model, batches, every={every})",
        f"communication costs {share:.0%} of a step; all-reduce is {facts.all_reduce_share():.0%} of the work, and "
        f"would be {then} times the batches",
        # Communication and the optimizer run once instead of four times.
        (share + facts.shares[OPTIMIZER]) * (1 - 1 / TIMES),
        headline,
        OTHER_TRAINING,
        predictions,
    )


def bucket_size(facts: Facts) -> Advice | None:
    """Detect a bucket size that would overlap better, by simulating others with the recorded arrival of gradients."""
    times = all_reduce_times(facts)
    layers = layers_of(facts, backward_seconds(facts)) if times else []
    if not sum(seconds for seconds, _ in layers):
        return None
    work, (message, byte) = Workload(0.0, [Layer(*layer) for layer in layers], 1.0), fit(times)

    def exposed(sizes: tuple[int, ...]) -> float:
        """Return the seconds of communication after backward with buckets of these capacities."""
        return backward_timeline(replace(work, bucket_bytes=sizes), lambda nbytes: message + byte * nbytes).exposed

    best, capacity = min((exposed(capacities(size, None)), size) for size in BUCKETS_MIB)
    # Capacities equal to the buckets' sizes reproduce the buckets.
    saved = exposed(tuple(nbytes for nbytes, _ in times if nbytes)) - best
    return Advice(
        "bucket-size",
        f"Set bucket_cap_mb={capacity:g}",
        f"in a simulation with this run's gradient arrival times, communication after backward is {saved * 1e3:.1f} ms "
        "shorter",
        min(saved / facts.length, facts.waiting),
        part_sentence(facts, COMMUNICATION),
    )
