"""Exposed communication."""

from __future__ import annotations

from paceline.profiler.analysis.confidence import NOTABLE, OTHER_TRAINING
from paceline.profiler.analysis.facts import Facts
from paceline.profiler.analysis.rules.words import part_sentence
from paceline.profiler.report.report import Advice
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
            "backward but the last, or paceline.accumulate(model, batches, steps)",
            f"communication costs {share:.0%} of a step, because each of its {averages:.0f} backward passes "
            "averages all gradients",
            share * (1 - 1 / averages),
            headline,
        )
    predictions = {str(times): facts.all_reduce_share(times) for times in ACCUMULATED}
    then = ", ".join(f"{predicted:.0%} at {times}" for times, predicted in predictions.items())
    many = f"{TIMES}" if facts.batches == 1 else f"{facts.batches * TIMES:.0f} instead of {facts.batches:.0f}"
    return Advice(
        "accumulation",
        f"Accumulate {many} batches between optimizer steps: paceline.accumulate(model, batches, steps)",
        f"communication costs {share:.0%} of a step; all-reduce is {facts.all_reduce_share():.0%} of the work, and "
        f"would be {then} times the batches",
        # Communication and the optimizer run once instead of four times.
        (share + facts.shares[OPTIMIZER]) * (1 - 1 / TIMES),
        headline,
        OTHER_TRAINING,
        predictions,
    )
