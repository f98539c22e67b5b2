"""A piece of advice, as the page, the terminal and ``summary.json`` show it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Advice:
    """A cause of lost time, with the change that removes it."""

    kind: str
    """Kind of advice, such as ``straggler``, ``accumulation``, ``data-loading``."""
    text: str
    """The change to make, in one sentence."""
    reason: str
    """The measurement behind it."""
    gain: float
    """Share of the time per sample that the change is predicted to save, between 0 and 1."""
    headline: str = ""
    """Verdict to give if this is the largest cost."""
    weight: float = 1.0
    """Weight of the gain when advice is ordered."""
    predictions: Mapping[str, float] = field(default_factory=dict)
    """Predicted share of all-reduce, by accumulation factor."""
