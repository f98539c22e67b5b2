"""Wording that several rules share: the verdict on a part of a step, and the function that takes most of its time."""

from __future__ import annotations

from collections import Counter

from paceline.profiler.analysis.confidence import FEWEST
from paceline.profiler.analysis.facts import Facts
from paceline.profiler.report import step_parts

OWN_CODE = "own code in the loop"


def function_of_own_code(facts: Facts, rank: int | None = None) -> str:
    """Return the function seen in most samples of own code, on `rank` or on all ranks; empty if samples are too few."""
    counts = Counter[str]()
    for record in facts.records:
        if rank is None or record.rank == rank:
            counts.update(record.own_code)
    name, count = counts.most_common(1)[0] if counts else ("", 0)
    return name if count >= max(FEWEST, counts.total() / 4) else ""


def part_sentence(facts: Facts, part: str) -> str:
    """Return a sentence that gives a part's share of the step."""
    share, function = f"{facts.shares[part]:.0%}", function_of_own_code(facts)
    much = f", much of it in {function}" if function else ""
    if part == step_parts.COMMUNICATION and facts.shares[step_parts.BUBBLE]:
        # No cause was found, so count small differences in arrival as part of the cost of communication.
        return f"Communication takes {facts.waiting:.0%} of a step, including the time ranks wait for each other."
    return {
        step_parts.DATA: f"The loop waits for data for {share} of the time.",
        step_parts.OPTIMIZER: f"The optimizer takes {share} of a step.",
        step_parts.CHECKPOINT: f"Saving checkpoints takes {share} of the time.",
        step_parts.OTHER: f"The loop's own code takes {share} of a step{much}.",
        step_parts.COMMUNICATION: f"Communication takes {share} of a step.",
    }[part]
