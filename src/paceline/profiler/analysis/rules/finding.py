"""A cause that costs time, with the change that removes it, and words that several rules share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from paceline.profiler.analysis.confidence import FEWEST
from paceline.profiler.analysis.facts import Facts
from paceline.profiler.report import step_parts

ONE_CAUSE, USUAL, OTHER_TRAINING = 2.0, 1.0, 0.5
"""Weights of a gain: of a cause that one change removes, and of a change that makes it another training."""
MOST = 0.95
"""Largest gain that is promised."""
OWN_CODE = "own code in the loop"
BEFORE_FORWARD = "before forward (data loading or own code)"
"""Place of the time that counts as waiting for data, where no DataLoader was seen."""


@dataclass(frozen=True)
class Finding:
    """A cause, and its remedy."""

    kind: str
    text: str
    """Remedy in one sentence."""
    reason: str
    """Measurement behind it."""
    parts: Mapping[str, float]
    """Shares of a step that the remedy saves, by the part that gets shorter."""
    headline: str = ""
    """Verdict on a run in which this costs most."""
    weight: float = USUAL
    predictions: Mapping[str, float] = field(default_factory=dict)

    @property
    def gain(self) -> float:
        """Share of a step that the remedy saves."""
        return min(MOST, max(0.0, sum(self.parts.values())))


def spread(gain: float, shares: Mapping[str, float], order: Iterable[str]) -> dict[str, float]:
    """Take `gain` from the parts in `order`, each as far as its share goes."""
    found: dict[str, float] = {}
    for part in dict.fromkeys(order):
        found[part] = min(gain, shares[part])
        gain -= found[part]
    return found


def function_of_own_code(facts: Facts, rank: int | None = None) -> str:
    """Return the function that most samples of own code saw, on `rank` or on all; empty where too few saw it."""
    seen = Counter[str]()
    for record in facts.records:
        if rank is None or record.rank == rank:
            seen.update(record.own_code)
    name, count = seen.most_common(1)[0] if seen else ("", 0)
    return name if count >= max(FEWEST, seen.total() / 4) else ""


def part_sentence(facts: Facts, part: str) -> str:
    """Say which share of the time a part of a step takes."""
    share, function = f"{facts.shares[part]:.0%}", function_of_own_code(facts)
    much = f", much in {function}" if function else ""
    if part == step_parts.COMMUNICATION and facts.shares[step_parts.BUBBLE]:
        # Ranks that come a little sooner or later, without a cause, are a part of what meeting costs.
        share = f"{sum(facts.shares[waiting] for waiting in step_parts.WAITING):.0%}"
        return f"Communication takes {share} of a step, waiting for each other included."
    return {
        step_parts.DATA: f"The loop waits for data for {share} of the time."
        if facts.has_loader
        else f"Work {BEFORE_FORWARD} takes {share} of a step{much}.",
        step_parts.OPTIMIZER: f"The optimizer takes {share} of a step.",
        step_parts.CHECKPOINT: f"Saving checkpoints takes {share} of the time.",
        step_parts.OTHER: f"The loop's own code takes {share} of a step{much}.",
        step_parts.COMMUNICATION: f"Communication takes {share} of a step.",
    }[part]
