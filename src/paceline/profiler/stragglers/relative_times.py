"""Compute times of ranks, relative to the median of the other ranks in the same step.

All tensors here have the shape (ranks, steps), and NaN stands for a time that is missing.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

CLIP = 3.5
"""Most that one step may say, in standard deviations: a spike weighs as little as any slow step."""
FEWEST_PEERS = 5
"""With fewer ranks their natural differences cannot be told from one slow rank."""
_DEVIATION = 1.4826  # standard deviation of a normal distribution over its median absolute deviation


@dataclass(frozen=True)
class RelativeTimes:
    """How every rank compares with the others in every step, and how much that varies by itself."""

    log_ratio: Tensor
    """Logarithm of a rank's time over that of the others, less the rank's natural difference; (ranks, steps)."""
    scale: Tensor
    """Standard deviation that the value in `log_ratio` has by chance; (ranks, steps)."""


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


def compare(seconds: Tensor, reference: Tensor) -> RelativeTimes:
    """Return the times relative to `reference`, the times of the others; both have the shape (ranks, steps)."""
    log_ratio = (
        torch.log(seconds / reference).float().nan_to_num(torch.nan, torch.nan, -10.0)
    )  # 0 seconds: below the clock
    ordered = log_ratio.sort(dim=1).values
    known = (~ordered.isnan()).sum(1)
    own = _own_scale(log_ratio, ordered, known)
    by_rank = own.clamp(min=float(own.nanmedian())) if len(own) > 2 else own
    natural = _natural_difference(_quantile(ordered, known, 0.5), by_rank / known.clamp(min=1).sqrt())
    log_ratio = log_ratio - natural[:, None]
    scale = by_rank[:, None]
    if len(own) > 2:  # in some steps all ranks differ more than usual, as while they warm up
        by_step = log_ratio.abs().nanmedian(0).values
        scale = scale * (by_step / (2 * by_step.nanmedian())).nan_to_num(1.0, 1.0).clamp(min=1.0)
    return RelativeTimes(log_ratio, scale.expand_as(log_ratio))


def _own_scale(log_ratio: Tensor, ordered: Tensor, known: Tensor) -> Tensor:
    """Return each rank's standard deviation among steps alike, whatever the share of the steps in which it was slow.

    Slow steps in a row leave most differences of neighbours as they are. Slow steps here and there, up to half of all,
    leave the distance of the lower quantiles as it is. So the smaller of both holds.
    """
    differences = log_ratio.diff(dim=1).abs().nanmedian(1).values * _DEVIATION / 2**0.5
    lower = (_quantile(ordered, known, 0.3) - _quantile(ordered, known, 0.1)) / 0.757
    return torch.minimum(differences.nan_to_num(torch.inf), lower.nan_to_num(torch.inf)).nan_to_num(0.0, 0.0, 0.0)


def _natural_difference(levels: Tensor, uncertainty: Tensor) -> Tensor:
    """Return the part of each rank's `level` that is usual in this fleet; 0 for ranks that stand out.

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


def _quantile(ordered: Tensor, known: Tensor, share: float) -> Tensor:
    """Return a quantile of each row of `ordered`, of which the first `known` values are numbers."""
    place = (share * (known - 1).clamp(min=0)).round().long()
    return ordered.gather(1, place[:, None]).squeeze(1)
