"""The steps in which one rank was slow, found from the window that raised the suspicion."""

from __future__ import annotations

import math

import torch
from torch import Tensor

_SWITCH = 6.0  # evidence that a change from slow to normal or back needs, as a logarithm of likelihoods
_MOST = 2.5  # evidence that one step can give, so that two spikes in a row change nothing
_FEWEST, _MOSTLY = 0.2, 0.85  # share of slow steps that makes a rank fluctuating, and that makes it slow all the time


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
    groups = _two_groups(inside, least) or _two_groups(log_ratio, least)
    level = float(inside.median()) if groups is None else groups[1]
    if level < least:
        return torch.zeros_like(log_ratio, dtype=torch.bool)
    if groups is None:
        level = _lesser_level(level, torch.cat([log_ratio[:first], log_ratio[end:]]), scale, least, persistence)
    evidence = (log_ratio - level / 2) * level / scale.clamp(min=least / 2) ** 2
    in_a_row = _two_states(evidence.clamp(-_MOST, _MOST), _SWITCH * persistence)
    if groups is None:
        return in_a_row
    here_and_there = _fluctuating(log_ratio > groups[0], inside > groups[0])
    slow = log_ratio > groups[0]
    if (in_a_row & slow).sum() >= _MOSTLY * max(in_a_row.sum(), (here_and_there & slow).sum()) > 0:
        return in_a_row
    return here_and_there & slow


def _lesser_level(level: float, outside: Tensor, scale: Tensor, least: float, persistence: float) -> float:
    """Return the level `outside` the window if the rank was slow there, too, only less; else `level`."""
    if not len(outside):
        return level
    lesser = float(outside.median())
    uncertainty = 1.25 * float(scale.median()) * (persistence / len(outside)) ** 0.5
    return lesser if least + 4 * uncertainty <= lesser < level else level


def _two_groups(values: Tensor, least: float) -> tuple[float, float] | None:
    """Return the border between normal and slow steps and the median of the slow ones, None if all are alike.

    The border is Otsu's. The halves of a normal distribution that is cut in two are 2.3 standard deviations of each
    apart, those of a uniform one 2.7.
    """
    ordered = values.sort().values
    size = len(ordered)
    ordered = ordered.clamp(float(ordered[size // 20]), float(ordered[size - 1 - size // 20]))
    sums = ordered.double().cumsum(0)
    below = torch.arange(1, size)
    between = below * (size - below) * (sums[:-1] / below - (sums[-1] - sums[:-1]) / (size - below)) ** 2
    if size < 2 or not _FEWEST <= 1 - (split := int(between.argmax()) + 1) / size <= _MOSTLY:
        return None
    normal, slow = ordered[:split], ordered[split:]
    distance = float(slow.median() - normal.median())
    within = 1.4826 * torch.cat([normal - normal.median(), slow - slow.median()]).abs().median().item()
    if (
        distance < (3 + 8 / size**0.5) * within
        or distance <= 0
        or normal.median() > max(least, float(slow.median()) / 4)
    ):
        return None
    return float(slow.median() + normal.median()) / 2, float(slow.median())


def _fluctuating(slow: Tensor, inside: Tensor) -> Tensor:
    """Return the steps from first to last among which `slow` ones are as frequent as `inside` the window."""
    share = min(float(inside.float().mean()), max(float(slow.float().mean()), _FEWEST), 0.95)
    chance = min((float(slow.sum() - inside.sum()) + 1) / (len(slow) - len(inside) + 50), share / 8)
    evidence = torch.where(slow, math.log(share / chance), math.log((1 - share) / (1 - chance)))
    return _two_states(evidence.clamp(max=_MOST), _SWITCH)


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
