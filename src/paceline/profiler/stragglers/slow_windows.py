"""Windows of steps in which a rank was slow: a scan over all lengths and positions, for all ranks at once.

A step's evidence is the rank's logarithmic ratio in standard deviations, clipped: a spike counts as one slow step.
The score of a window is the sum of its evidence over the root of its length, as in the scan statistic of change-point
detection (Arias-Castro, Donoho, Huo, IEEE Trans. Inf. Theory 51, 2005; robust by clipping as in Fearnhead and Rigaill,
J. Am. Stat. Assoc. 114, 2019). What repeats by itself, such as noise that lasts several steps, lowers every score.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.profiler.stragglers.relative_times import CLIP, FEWEST_PEERS, RelativeTimes

SHORTEST = 5
"""Steps; in fewer a slow rank cannot be told from spikes."""
_SAMPLE = 64  # ranks from which the noise that all share is estimated
_USUAL_BEST = 3.0  # at most, the lower quartile over the ranks of the best score if nothing is slow


@dataclass(frozen=True)
class Scan:
    """The best window of every rank."""

    evidence: Tensor
    """Evidence of each step in standard deviations, 0 where a time is missing; (ranks, steps)."""
    score: Tensor
    """The best window's score for each rank, 0 without one."""
    fluctuating: Tensor
    """How many more long steps each rank has than others have, as a score; 0 if they are few."""
    window: Tensor
    """First step of the best window and the step behind it; (ranks, 2)."""
    persistence: float
    """Steps that noise lasts, 1 if every step varies by itself."""


def scan(times: RelativeTimes, tolerance: float) -> Scan:
    """Return the window of each rank in which it was slowest for longest.

    Args:
        times: the ranks' times relative to the others.
        tolerance: the logarithm of the ratio that counts as not slow at all.
    """
    known = ~times.log_ratio.isnan()
    # Without a floor, times without noise would make a matter of life and death of every microsecond.
    scale = times.scale.clamp(min=tolerance)
    evidence = ((times.log_ratio - tolerance) / scale).clamp(-CLIP, CLIP).nan_to_num(0.0).float()
    count = known.sum(1).clamp(min=1)
    fluctuating = _fluctuation_score(evidence, count)
    if len(evidence) >= FEWEST_PEERS:  # in noise that is skewed, every rank has more long steps than short ones
        bias = (evidence.sum(1) / count).quantile(0.375).clamp(min=0.0)
        evidence = (evidence - bias) * known
    persistence = _persistence(times.log_ratio, scale, known)
    score, window = _best_windows(evidence, known)
    score = score / (_variance(evidence, known, count) * persistence).sqrt()
    if len(evidence) >= FEWEST_PEERS:  # what is left in the scores of most ranks is no straggler either
        score = score / (score.quantile(0.25) / _USUAL_BEST).clamp(min=1.0)
    return Scan(evidence, score, fluctuating, window, persistence)


def refine(evidence: Tensor, first: int, end: int) -> tuple[int, int]:
    """Return the best window near that from `first` to `end`, to the step; `evidence` is one rank's, without gaps."""
    sums = torch.nn.functional.pad(evidence.double().cumsum(0), (1, 0))
    places = torch.arange(len(sums))
    for _ in range(4):
        length = (end - places[: max(end - SHORTEST + 1, 1)]).clamp(min=1)
        first = int(((sums[end] - sums[: len(length)]) / length.sqrt()).argmax())
        start = min(first + SHORTEST, len(evidence))
        end = start + int(((sums[start:] - sums[first]) / (places[start:] - first).sqrt()).argmax())
    return first, end


def _fluctuation_score(evidence: Tensor, count: Tensor) -> Tensor:
    """Return the root of twice the logarithmic likelihood ratio of each rank's share of steps at the clip.

    By chance that share would be what most ranks have, or what the rank has at the other end.
    """
    long, short = ((sign * evidence >= CLIP).sum(1) for sign in (1, -1))
    share = (long / count).double()
    usual = share.sort().values[(len(share) - 1) // 2]
    chance = torch.maximum(usual, short / count) + 1 / (count * min(len(share) - 1, 3) + 1)
    chance = torch.minimum(chance, share.clamp(min=1e-6))
    normal = 1 - share
    gain = (
        share * (share.clamp(min=1e-6) / chance).log()
        + normal * (normal.clamp(min=1e-6) / (1 - chance).clamp(min=1e-6)).log()
    )
    enough = (share >= 0.2) & (long >= SHORTEST)
    return torch.where(enough, (2 * count * gain).clamp(min=0).sqrt(), 0.0)


def _variance(evidence: Tensor, known: Tensor, count: Tensor) -> Tensor:
    """Return the variance of each rank's evidence by chance, at least 1.

    Steps that are slow now and then make neighbours differ, but not the steps below the median.
    """
    of_neighbours = evidence.diff(dim=1).square().sum(1) / (2 * count)
    values = torch.where(known, evidence, torch.nan)
    below = (values.nanmedian(1, keepdim=True).values - values).clamp(min=0)
    lower = 2 * below.square().nansum(1) / count
    return torch.minimum(of_neighbours, 2 * lower.clamp(min=0.5)).clamp(min=1.0)


def _persistence(log_ratio: Tensor, scale: Tensor, known: Tensor) -> float:
    """Return the variance of sums over many steps as a multiple of what it is for steps that vary by themselves.

    It compares neighbouring blocks of steps, because a rank that becomes slow only spoils one of these differences.
    """
    ranks = len(log_ratio)
    some = torch.linspace(0, ranks - 1, min(ranks, _SAMPLE)).round().long()
    complete = known[some].any(0)
    values = (log_ratio[some] / scale[some])[:, complete]
    variances: list[float] = []
    length = 1
    while (pairs := values.shape[1] // (2 * length)) * min(ranks - 1, 4) >= 40 and pairs >= 8:
        blocks = values[:, : pairs * 2 * length].unflatten(1, (pairs, 2 * length))
        near = (blocks - blocks.nanmedian(2, keepdim=True).values).clamp(-CLIP, CLIP).nan_to_num(0.0)
        difference = near[:, :, length:].sum(2) - near[:, :, :length].sum(2)
        variances.append(float(difference.abs().median(1).values.median()) ** 2 / length)
        length *= 2
    if not variances or variances[0] == 0:
        return 1.0
    return max(1.0, max(variances) / variances[0])


def _best_windows(evidence: Tensor, known: Tensor) -> tuple[Tensor, Tensor]:
    """Return the best score of each rank and its window, over lengths that grow by a fifth or more."""
    ranks, steps = evidence.shape
    sums = torch.nn.functional.pad(evidence.cumsum(1), (1, 0))
    gaps = not bool(known.all())
    counts = torch.nn.functional.pad(known.float().cumsum(1), (1, 0)) if gaps else None
    best = torch.zeros(ranks)
    window = torch.zeros(ranks, 2, dtype=torch.long)
    for length in _lengths(steps):
        score = sums[:, length:] - sums[:, :-length]
        if counts is None:
            score *= length**-0.5
        else:
            number = counts[:, length:] - counts[:, :-length]
            score = torch.where(number >= SHORTEST, score * number.clamp(min=1).rsqrt(), 0.0)
        top, first = score.max(1)
        better = top > best
        best = torch.where(better, top, best)
        window = torch.where(better[:, None], torch.stack([first, first + length], 1), window)
    return best, window


def _lengths(steps: int) -> list[int]:
    lengths = [min(SHORTEST, steps)]
    while lengths[-1] < steps:
        lengths.append(min(steps, max(lengths[-1] + 1, lengths[-1] * 6 // 5)))
    return lengths
