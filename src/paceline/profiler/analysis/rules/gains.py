"""Gains of advice: which parts of a step get shorter, and what is left of them for other advice."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from paceline.profiler.report import step_parts
from paceline.profiler.report.report import Advice


def promise(
    kind: str,
    text: str,
    reason: str,
    parts: Mapping[str, float],
    predictions: Mapping[str, float] | None = None,
    trial: Mapping[str, float] | None = None,
) -> Advice:
    """Return advice whose gain is the sum of the shares that it saves of each of `parts`."""
    return Advice(kind, text, reason, max(0.0, sum(parts.values())), dict(parts), None, predictions or {}, trial or {})


def spread(gain: float, shares: Mapping[str, float], order: Iterable[str]) -> dict[str, float]:
    """Take `gain` from the parts in `order`, each as far as its share goes."""
    found = {}
    # Each part once: an order such as [*WAITING, *ALL] names some twice.
    for part in dict.fromkeys(order):
        found[part] = min(gain, shares[part])
        gain -= found[part]
    return found


def in_turn(advice: Sequence[Advice], shares: Mapping[str, float]) -> list[Advice]:
    """Return `advice` with what each still saves once all before it is followed.

    An advice shortens a part by the same ratio, whatever is left of it.
    """
    remaining, found = dict(shares), []
    for place, one in enumerate(advice):
        left = 0.0
        for part, gain in one.parts.items():
            if shares[part] > 0:
                saved = gain / shares[part] * remaining[part]
                remaining[part] -= saved
                left += saved
        # The first saves all of its gain, so it says nothing more.
        found.append(replace(one, left=max(0.0, left) if place else None))
    return found


NON_COMPUTE = tuple(part for part in step_parts.ALL if part not in step_parts.COMPUTE)
"""Parts of a step that are not forward and backward."""
