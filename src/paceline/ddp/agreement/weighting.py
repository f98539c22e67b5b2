"""The scale of gradients: that of a mean over ranks, or over the weights of micro-batches (``model.weight(w)``)."""

from __future__ import annotations

from collections.abc import Sequence

UNWEIGHTED, WEIGHTED, UNCOUNTED, BY_SLICE = 1, 2, 4, 8
"""Bits of :attr:`~paceline.ddp.agreement.control_block.Status.weighting`. With the last one
the weight is the number of this rank's slices, not the program's. Without ``WEIGHTED`` beside it the rank ran no
backward, and its slices count only if no rank has weights of the program's."""


def compute_scale(notes: Sequence[tuple[float, float]]) -> float:
    """Return the factor that turns sums over ranks into means: 1/N, or 1/Σw where micro-batches were weighted.

    N counts the ranks, without those that have no data and must not be counted (``UNCOUNTED``).

    Args:
        notes: weight and weighting of each rank, see :class:`~paceline.ddp.agreement.control_block.Status`. If all
            weights are zero there is nothing to learn from, and the gradient is zero.
    """
    bits, counted = 0, 0
    for _, weighting in notes:
        bits |= int(weighting)
        counted += not int(weighting) & UNCOUNTED
    if bits & WEIGHTED:
        total = total_weight(notes)
        return 1.0 / total if total else 0.0
    return 1.0 / max(1, counted)


def total_weight(notes: Sequence[tuple[float, float]]) -> float:
    """Return the sum of the weights: the program's, or numbers of slices where there are none of these."""
    is_given = any(int(weighting) & (WEIGHTED | BY_SLICE) == WEIGHTED for _, weighting in notes)
    return sum((weight for weight, weighting in notes if not (is_given and int(weighting) & BY_SLICE)), 0.0)


def compute_correction(notes: Sequence[tuple[float, float]]) -> float:
    """Return the factor that turns means over all ranks into those of :func:`compute_scale`; 1.0 if these are equal."""
    if any(int(weighting) & (WEIGHTED | UNCOUNTED) for _, weighting in notes):
        return compute_scale(notes) * len(notes)
    return 1.0
