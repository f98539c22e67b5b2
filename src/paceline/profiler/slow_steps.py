"""The steps in which one rank was slow, found from the window that raised the suspicion."""

from __future__ import annotations

import torch
from torch import Tensor

_SWITCH = 6.0  # evidence that a change from slow to normal or back needs, as a logarithm of likelihoods
_MOST = 2.5  # evidence that one step can give, so that two spikes in a row change nothing
_APART = 4.0  # distance of two groups of steps, in standard deviations of each, that makes them two
_FEWEST, _MANY = 0.2, 0.85  # share of slow steps in a window that makes a rank fluctuating


def slow_steps(log_ratio: Tensor, scale: Tensor, window: tuple[int, int], least: float, persistence: float) -> Tensor:
    """Return which steps were slow, as booleans.

    Args:
        log_ratio: logarithm of the rank's time over that of the others, for each step in which it is known.
        scale: its standard deviation by chance.
        window: first step and end of the window in which the rank was slowest for longest.
        least: logarithm of the smallest ratio that counts as slow.
        persistence: steps that noise lasts.
    """
    first, end = window
    inside = log_ratio[first:end]
    border = _border(inside)
    if border is not None:
        slow = torch.zeros_like(log_ratio, dtype=torch.bool)
        slow[first:end] = inside > border
        return slow
    level = float(inside.median())
    if level < least:
        return torch.zeros_like(log_ratio, dtype=torch.bool)
    outside = torch.cat([log_ratio[:first], log_ratio[end:]])
    if len(outside) and least <= float(outside.median()) < level:
        level = float(outside.median())  # it was slow there, too, only less
    evidence = (log_ratio - level / 2) * level / scale.clamp(min=least / 2) ** 2
    return _two_states(evidence.clamp(-_MOST, _MOST), _SWITCH * persistence)


def _border(values: Tensor) -> float | None:
    """Return the value between slow and normal steps if `values` fall in two groups, else None (Otsu's threshold)."""
    ordered = values.sort().values
    size = len(ordered)
    ordered = ordered.clamp(float(ordered[size // 20]), float(ordered[size - 1 - size // 20]))
    sums = ordered.cumsum(0)
    below = torch.arange(1, size, dtype=values.dtype)
    between = below * (size - below) * (sums[:-1] / below - (sums[-1] - sums[:-1]) / (size - below)) ** 2
    if size < 2 or not _FEWEST <= 1 - (split := int(between.argmax()) + 1) / size <= _MANY:
        return None
    normal, slow = ordered[:split], ordered[split:]
    distance = slow.median() - normal.median()
    within = 1.4826 * torch.cat([normal - normal.median(), slow - slow.median()]).abs().median()
    if distance < _APART * within or distance <= 0 or normal.median() > slow.median() / 2:
        return None
    return float(slow.median() + normal.median()) / 2


def _two_states(evidence: Tensor, switch: float) -> Tensor:
    """Return the most likely sequence of slow (True) and normal steps, where each change costs `switch` (Viterbi)."""
    slow_score = normal_score = 0.0
    came_slow, came_normal = [], []  # whether the best way to be slow, or normal, in a step was slow in the step before
    for value in evidence.tolist():
        came_slow.append(slow_score >= normal_score - switch)
        came_normal.append(slow_score - switch > normal_score)
        slow_score, normal_score = (
            max(slow_score, normal_score - switch) + value,
            max(normal_score, slow_score - switch),
        )
    states = []
    slow = slow_score > normal_score
    for from_slow, from_normal in zip(reversed(came_slow), reversed(came_normal), strict=True):
        states.append(slow)
        slow = from_slow if slow else from_normal
    return torch.tensor(states[::-1], dtype=torch.bool)
