"""Compute times of ranks, relative to the median of the other ranks in the same step.

All tensors here have the shape (ranks, steps), and NaN stands for a time that is missing.
"""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Tensor

Count = TypeVar("Count", int, Tensor)

CLIP = 3.5
"""Largest evidence of one step, in standard deviations, so that a spike weighs no more than any slow step."""
_PARTS, SHORTEST_PART = 8, 10
"""Stretches of which the fast ones tell a rank's usual time, and the steps that each has at least."""
NEAR, FARTHEST, _GAP = 1.5, 3.0, 0.75
"""Differences, in multiples of the smallest slowdown, that are natural for sure, and that can be."""
_LOW = 0.4
"""Quantile that is not slow where a rank is slow in half of the steps."""
_APART = 4
"""Steps between times that tell how long noise lasts."""
FEWEST_PEERS = 5
"""Fewest ranks whose natural differences can be told from one slow rank."""
_DEVIATION = 1.4826
"""Standard deviation of a normal distribution divided by its median absolute deviation."""


def median_of_others(seconds: Tensor, peers: Tensor) -> Tensor:
    """Return, for each rank and step, the median over the other ranks that are `peers` there; NaN if none is.

    Args:
        seconds: times, shape (ranks, steps).
        peers: True where a time counts as a peer's; the same shape.
    """
    rows = torch.where(peers, seconds, torch.nan).T.contiguous()
    ordered = rows.sort(dim=1).values  # NaN comes last
    peers_there = (~ordered.isnan()).sum(1, keepdim=True)
    without = torch.zeros_like(rows)
    # The middle places among one fewer: one where that is an odd number, else two.
    for index in ((peers_there - 2) // 2, (peers_there - 1) // 2):
        # Without the rank itself, the times that are not below its own move up by one place.
        here, behind = (ordered.gather(1, place.clamp(0, rows.shape[1] - 1)) for place in (index, index + 1))
        without += torch.where(rows <= here, behind, here) / 2
    of_all = sum(
        ordered.gather(1, index.clamp(min=0)) / 2
        for index in ((peers_there - 1) // 2, (peers_there // 2).clamp(max=len(ordered[0]) - 1))
    )
    without = torch.where(peers_there > 1, without, torch.nan)
    # A rank that is no peer itself is compared with all that are.
    return torch.where(rows.isnan(), of_all, without).T.contiguous()


def usual_differences(seconds: Tensor, least: float) -> tuple[Tensor, Tensor]:
    """Return the logarithm of each rank's usual time over that of the fastest quarter, and which ranks are usual.

    A rank's usual time is that of its fast stretches, so a rank that gets slow is compared with its own past. A rank
    that is slow from the start has no such past. It is told by its distance from the other ranks: those that differ by
    little, or form a chain with small gaps, differ by nature. For the others the difference is 0.

    Args:
        seconds: times, shape (ranks, steps).
        least: logarithm of the smallest ratio that counts as slow.
    """
    ranks, steps = seconds.shape
    at = fewest_not_slow(ranks) - 1
    # A time of 0 is below the clock's resolution, and has no logarithm.
    logs = seconds.clamp(min=1e-9).log()
    logs = logs - logs.nanmean(0)  # without the steps that are longer for all
    parts = logs.tensor_split(max(1, min(_PARTS, steps // SHORTEST_PART)), dim=1)
    levels = torch.stack([_quantiles(part, _LOW)[0] for part in parts], dim=1)
    levels = levels - levels.nan_to_num(torch.inf).sort(dim=0).values[at]
    # A quarter of the parts, so that a rank which is slow in most of the others keeps its usual time.
    level = _quantiles(levels, 0.25)[0]
    ordered, order = level.nan_to_num(torch.inf, torch.inf).sort()
    distance = ordered - ordered[at]
    gaps = distance.diff(prepend=distance[:1])
    # The fastest quarter is usual by definition, however far apart its ranks are.
    gaps[: at + 1] = 0
    chained = (gaps < _GAP * least).cumprod(0).bool() & (distance < FARTHEST * least)
    usual = torch.zeros(ranks, dtype=torch.bool)
    usual[order] = chained | (distance < NEAR * least)
    return torch.where(usual, level - ordered[at], 0.0).nan_to_num(0.0), usual


def relative(seconds: Tensor, reference: Tensor) -> Tensor:
    """Return the logarithms of `seconds` over `reference`."""
    log_ratio = torch.log(seconds / reference).float()
    return log_ratio.nan_to_num(torch.nan, torch.nan, -10.0)  # 0 seconds: below the clock


def fewest_not_slow(ranks: Count) -> Count:
    """Return how many of `ranks` ranks are not slow at least: a quarter and one more."""
    return (ranks + 5) // 4


def scale_of(log_ratio: Tensor) -> Tensor:
    """Return the standard deviation that each rank's steps have by chance; with many ranks, at least the usual one."""
    own = _own_scale(log_ratio)
    return own.clamp(min=float(own.nanmedian())) if len(own) > 2 else own


def evidence_of(log_ratio: Tensor, scale: Tensor, least: float) -> Tensor:
    """Return the evidence of each step, in standard deviations, 0 where a time is missing.

    Args:
        log_ratio: of :func:`relative`.
        scale: standard deviation of each rank.
        least: logarithm of the smallest ratio that counts as slow; half of it is not slow at all.
    """
    known = ~log_ratio.isnan()
    evidence = ((log_ratio - least / 2) / scale[:, None]).clamp(-CLIP, CLIP).nan_to_num(0.0)
    if len(evidence) >= FEWEST_PEERS:  # in noise that is skewed, every rank has more long steps than short ones
        bias = (evidence.sum(1) / known.sum(1).clamp(min=1)).quantile(0.25).clamp(min=0.0)
        evidence = (evidence - bias) * known
    return evidence


def variance_of(evidence: Tensor, log_ratio: Tensor, scale: Tensor) -> Tensor:
    """Return the variance of a sum of each rank's evidence over many steps by chance, for a step; at least 1.

    Steps that are slow now and then make neighbours differ, but not the steps below the median. In noise that keeps a
    share r from step to step (an autoregressive process), sums vary (1 + r) / (1 - r)² times as much as neighbours do,
    and r follows from how much less neighbours differ than steps further apart.
    """
    known = ~log_ratio.isnan()
    count = known.sum(1).clamp(min=1)
    of_neighbours = evidence.diff(dim=1).square().sum(1) / (2 * count)
    values = torch.where(known, evidence, torch.nan)
    below = (_quantiles(values, _LOW)[0][:, None] - values).clamp(min=0)
    variance = torch.minimum(of_neighbours, 4 * below.square().nansum(1) / count)
    kept = _share_kept(log_ratio)
    # In units of the scale, neighbours vary by 1, and by more in skewed noise. Few steps know the scale badly.
    of_neighbours = ((_step_apart(log_ratio, 1) * _DEVIATION / scale).square() / 2).clamp(
        max=max(1.0, log_ratio.shape[1] / 50)
    )
    return torch.maximum(variance, of_neighbours * (1 + kept) / (1 - kept) ** 2).clamp(min=1.0)


def _share_kept(log_ratio: Tensor) -> float:
    """Return the share of noise that a step keeps from the one before, from 0 to 0.9."""
    near, far = _step_apart(log_ratio, 1), _step_apart(log_ratio, _APART)
    if near == 0:
        return 0.0
    by_chance = 2 * (log_ratio.numel() / 2) ** -0.5 + 25 / log_ratio.shape[1]  # few steps tell it badly
    # If a step keeps the share r, far² / near² is 1 + r + … with as many terms as steps lie between.
    terms = (far / near) ** 2 - by_chance
    shares = torch.arange(0, 0.91, 0.01)
    sums = sum(shares**power for power in range(_APART))
    return float(shares[: max(1, int((sums <= terms).sum()))].max())


def _step_apart(values: Tensor, lag: int) -> float:
    """Return by how much values that are `lag` steps apart differ: the median of the ranks' medians."""
    return (values[:, lag:] - values[:, :-lag]).abs().nanmedian(1).values.nanmedian().nan_to_num(0.0).item()


def longest_stretch(evidence: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return each rank's stretch with the largest sum of evidence: its first step, the step behind it, and the sum."""
    sums = torch.nn.functional.pad(evidence.double().cumsum(1), (1, 0))
    # A stretch's sum is the difference of two sums from the start, so the largest begins at the lowest before its end.
    lowest, since = sums.cummin(1)
    gain, end = (sums - lowest).max(1)
    return since.gather(1, end[:, None]).squeeze(1), end, gain


def _own_scale(log_ratio: Tensor) -> Tensor:
    """Return each rank's standard deviation among equally slow steps, even if it was slow in some of them.

    Slow steps in a row leave most differences of neighbours as they are. Slow steps here and there, up to half of all,
    leave the distance of the lower quantiles as it is. So the smaller of both holds.
    """
    # The difference of two steps has √2 times the deviation of one; a normal distribution's quantiles 0.1 and 0.3 are
    # 0.757 deviations apart.
    differences = log_ratio.diff(dim=1).abs().nanmedian(1).values * _DEVIATION / 2**0.5
    low, high = _quantiles(log_ratio, 0.1, 0.3)
    lower = (high - low) / 0.757
    return torch.minimum(differences.nan_to_num(torch.inf), lower.nan_to_num(torch.inf)).nan_to_num(0.0, 0.0, 0.0)


def _quantiles(values: Tensor, *shares: float) -> list[Tensor]:
    """Return quantiles of the numbers in each row."""
    ordered = values.sort(dim=1).values  # NaN comes last
    last = ((~ordered.isnan()).sum(1, keepdim=True) - 1).clamp(min=0)
    return [ordered.gather(1, (share * last).round().long()).squeeze(1) for share in shares]
