"""Compute times of ranks, relative to the median of the other ranks in the same step.

All tensors here have the shape (ranks, steps), and NaN stands for a time that is missing.
"""

from __future__ import annotations

import torch
from torch import Tensor

CLIP = 3.5
"""Largest evidence of one step, in standard deviations, so that a spike weighs no more than any slow step."""
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
    for index in ((peers_there - 2) // 2, (peers_there - 1) // 2):
        # Without the rank itself, the times that are not below its own move up by one place.
        here, behind = (ordered.gather(1, place.clamp(0, rows.shape[1] - 1)) for place in (index, index + 1))
        without += torch.where(rows <= here, behind, here) / 2
    of_all = sum(
        ordered.gather(1, index.clamp(min=0)) / 2
        for index in ((peers_there - 1) // 2, (peers_there // 2).clamp(max=len(ordered[0]) - 1))
    )
    without = torch.where(peers_there > 1, without, torch.nan)
    return torch.where(rows.isnan(), of_all, without).T.contiguous()


def relative(seconds: Tensor, reference: Tensor) -> Tensor:
    """Return the logarithms of `seconds` over `reference`, less the usual differences among these ranks."""
    log_ratio = torch.log(seconds / reference).float()
    log_ratio = log_ratio.nan_to_num(torch.nan, torch.nan, -10.0)  # 0 seconds: below the clock
    uncertainty = _own_scale(log_ratio) / (~log_ratio.isnan()).sum(1).clamp(min=1).sqrt()
    return log_ratio - _natural_difference(_quantiles(log_ratio, 0.5)[0], uncertainty)[:, None]


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
        bias = (evidence.sum(1) / known.sum(1).clamp(min=1)).quantile(0.375).clamp(min=0.0)
        evidence = (evidence - bias) * known
    return evidence


def variance_of(evidence: Tensor, known: Tensor) -> Tensor:
    """Return the variance of a sum of each rank's evidence over many steps by chance, for a step; at least 1.

    Steps that are slow now and then make neighbours differ, but not the steps below the median. In noise that keeps a
    share r from step to step (an autoregressive process), sums vary (1 + r) / (1 - r)² times as much as neighbours do,
    and r follows from how much less neighbours differ than steps further apart.
    """
    count = known.sum(1).clamp(min=1)
    of_neighbours = evidence.diff(dim=1).square().sum(1) / (2 * count)
    values = torch.where(known, evidence, torch.nan)
    below = (values.nanmedian(1, keepdim=True).values - values).clamp(min=0)
    variance = torch.minimum(of_neighbours, 4 * below.square().nansum(1) / count)
    near, far = ((values[:, lag:] - values[:, :-lag]).abs().nanmedian(1).values.nanmedian().item() for lag in (1, 2))
    by_chance = 2 * evidence.shape[1] ** -0.5
    kept = min(max((far / near) ** 2 - 1 - by_chance, 0.0), 0.9) if near > 0 else 0.0
    lasting = (near * _DEVIATION) ** 2 / 2 * (1 + kept) / (1 - kept) ** 2
    return variance.clamp(min=max(1.0, lasting))


def longest_stretch(evidence: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return each rank's stretch with the largest sum of evidence: its first step, the step behind it, and the sum."""
    sums = torch.nn.functional.pad(evidence.double().cumsum(1), (1, 0))
    lowest, since = sums.cummin(1)
    gain, end = (sums - lowest).max(1)
    return since.gather(1, end[:, None]).squeeze(1), end, gain


def _own_scale(log_ratio: Tensor) -> Tensor:
    """Return each rank's standard deviation among equally slow steps, even if it was slow in some of them.

    Slow steps in a row leave most differences of neighbours as they are. Slow steps here and there, up to half of all,
    leave the distance of the lower quantiles as it is. So the smaller of both holds.
    """
    differences = log_ratio.diff(dim=1).abs().nanmedian(1).values * _DEVIATION / 2**0.5
    low, high = _quantiles(log_ratio, 0.1, 0.3)
    lower = (high - low) / 0.757
    return torch.minimum(differences.nan_to_num(torch.inf), lower.nan_to_num(torch.inf)).nan_to_num(0.0, 0.0, 0.0)


def _natural_difference(levels: Tensor, uncertainty: Tensor) -> Tensor:
    """Return the part of each rank's `level` that is usual among these ranks; 0 for ranks that stand out.

    The spread is that of the faster half, so that it stays the same if as many as half of the ranks are slow.
    """
    levels = levels.nan_to_num(0.0)
    ranks = len(levels)
    if ranks < FEWEST_PEERS:
        return torch.zeros_like(levels)
    low, high = torch.quantile(levels, torch.tensor([0.125, 0.375], dtype=levels.dtype))
    spread = (high - low) / 0.832
    by_chance = 1.25 * uncertainty.nanmedian()
    spread = (spread**2 - by_chance**2).clamp(min=0).sqrt()
    center = high + 0.319 * spread
    usual = (levels - center).abs() <= (4.2 + 10 / ranks) * spread
    return torch.where(usual, levels, 0.0)


def _quantiles(values: Tensor, *shares: float) -> list[Tensor]:
    """Return quantiles of the numbers in each row."""
    ordered = values.sort(dim=1).values  # NaN comes last
    last = ((~ordered.isnan()).sum(1, keepdim=True) - 1).clamp(min=0)
    return [ordered.gather(1, (share * last).round().long()).squeeze(1) for share in shares]
