"""Communication that a step shows."""

from __future__ import annotations

from paceline.profiler.analysis.bucket_sizes import best_capacity
from paceline.profiler.analysis.confidence import NOTABLE
from paceline.profiler.analysis.facts import Facts
from paceline.profiler.analysis.rules.finding import OTHER_TRAINING, Finding, part_sentence, spread
from paceline.profiler.report import step_parts

ACCUMULATED, TIMES = (2, 4, 8), 4
"""Times as many batches in a step for which all-reduce's share is predicted, and the one that is advised."""


def accumulation(facts: Facts) -> Finding | None:
    """Find communication that backward does not hide."""
    share = facts.shares[step_parts.COMMUNICATION]
    if len(facts.records) < 2 or share < NOTABLE:
        return None
    if facts.averages > 3 / 2:
        return _average_once(facts)
    predictions = {str(times): facts.all_reduce_share(times) for times in ACCUMULATED}
    then = ", ".join(f"{predicted:.0%} at {times}" for times, predicted in predictions.items())
    many = f"{TIMES}" if facts.batches == 1 else f"{facts.batches * TIMES:.0f} in place of {facts.batches:.0f}"
    # With four times the batches in a step, communication and optimizer run once in place of four times.
    once = (step_parts.COMMUNICATION, step_parts.OPTIMIZER)
    return Finding(
        "accumulation",
        f"Accumulate {many} batches between optimizer steps: paceline.accumulate(model, batches, steps)",
        f"communication costs {share:.0%} of a step; all-reduce is {facts.all_reduce_share():.0%} of the work, and "
        f"would be {then} times the batches",
        {part: facts.shares[part] * (1 - 1 / TIMES) for part in once},
        part_sentence(facts, step_parts.COMMUNICATION),
        OTHER_TRAINING,
        predictions,
    )


def _average_once(facts: Facts) -> Finding:
    """Advise on gradients that are accumulated, but averaged in every backward."""
    share, times = facts.shares[step_parts.COMMUNICATION], facts.averages
    return Finding(
        "accumulation",
        f"Average gradients once in a step, not {times:.0f} times: model.no_sync() around every forward and backward "
        "but the last, or paceline.accumulate(model, batches, steps)",
        f"communication costs {share:.0%} of a step, because each of its {times:.0f} backwards averages all gradients",
        {step_parts.COMMUNICATION: share * (1 - 1 / times)},
        part_sentence(facts, step_parts.COMMUNICATION),
    )


def bucket_size(facts: Facts) -> Finding | None:
    """Find a bucket size that would overlap better."""
    better = best_capacity(facts)
    if better is None:
        return None
    capacity, saved = better
    return Finding(
        "bucket-size",
        f"Set bucket_cap_mb={capacity:g}",
        f"simulated with the times at which this run's gradients came, communication after backward would be "
        f"{saved * 1e3:.1f} ms shorter",
        spread(saved / facts.length, facts.shares, step_parts.WAITING),
        part_sentence(facts, step_parts.COMMUNICATION),
    )
