"""Straggler detection: finds ranks that computed longer than the others, in times from any source.

Internal tensors of times have shape (ranks, steps). NaN marks a missing time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from paceline.errors import UsageError

DEFAULT_SLOWDOWN = 1.1
"""Default of `min_slowdown`."""
SHORTEST = 5
"""Minimum number of slow steps. Fewer may be spikes."""
THRESHOLD, FEW = 4.5, 15
"""Largest score that chance explains, measured by ``benchmarks/straggler_detection.py``, and minimum length of a
stretch; shorter stretches are scored as if they had this length."""
CLIP = 3.5
"""Maximum evidence of one step, in standard deviations, so that a spike counts no more than any other slow step."""
BLOCKS = 40
"""Number of blocks into which steps are divided to estimate the noise. Most noise lasts less than a block."""
NEAR, FARTHEST, GAP = 1.5, 3.0, 0.75
"""Which differences between ranks are natural, in multiples of the smallest slowdown: those below `NEAR`, and those
below `FARTHEST` if, in order of speed, no two neighboring ranks up to there are `GAP` or more apart."""
SOMETIMES, MOSTLY = 0.2, 0.7
"""Minimum share of slow steps in a stretch that is slow now and then, and in a stretch that is slow throughout."""


@dataclass(frozen=True)
class Straggler:
    """A rank that computed longer than the others for at least part of the job."""

    rank: int
    first_step: int
    last_step: int
    """Last slow step, inclusive."""
    slowdown: float
    """Median, over the slow steps, of its time divided by the median time of the ranks that were not slow."""
    kind: str
    """``"persistent"``: slow all the time. ``"emerging"``: slow from `first_step` to the end. ``"recovered"``: slow
    until `last_step` and normal afterwards. ``"fluctuating"``: slow repeatedly, and normal in between."""
    steps_slow: int
    """Number of slow steps. It is smaller than the range from `first_step` to `last_step` if the rank fluctuates or if
    times are missing."""
    seconds_lost: float
    """Sum, over the slow steps, of its time minus the median of the others."""


def find_stragglers(seconds: Any, *, min_slowdown: float = DEFAULT_SLOWDOWN) -> list[Straggler]:
    """Return the ranks that computed longer than the others, costliest first.

    Pass compute times, not step times: ranks wait for each other, so a step takes equally long on all of them. A rank
    is returned if its median slowdown over its slow steps is at least `min_slowdown` and chance does not explain it.
    More than a quarter of the ranks must be fast.

    A rank that becomes slow is compared with its own past. A rank that is slow from the start is compared with the
    fastest quarter of the ranks; for such a rank, a ratio of up to 1.15 counts as a natural difference.
    docs/stragglers.md describes the method and its accuracy.

    Args:
        seconds: compute time of each step on each rank, shape (steps, ranks): a tensor, an array, or a list of
            rows, with NaN for a missing time.
        min_slowdown: smallest slowdown to report.

    Raises:
        UsageError: if `seconds` has another shape or a negative or infinite number, or `min_slowdown` is not above 1.
    """
    table = _as_table(seconds)
    steps, ranks = table.shape
    if not (min_slowdown > 1 and math.isfinite(min_slowdown)):
        raise UsageError(f"min_slowdown must be a finite number above 1, not {min_slowdown}")
    if ranks < 2 or steps < SHORTEST:
        return []
    times = table.T.contiguous()
    begin = _warm_up(times)
    threshold = math.log(min_slowdown)
    slow = torch.zeros_like(times, dtype=torch.bool)
    of_all = _median_of_others(times, ~slow)
    # Stragglers distort the usual times, so each pass excludes those already found. The first pass finds the clear
    # ones.
    for limit in (NEAR * threshold, threshold, threshold):
        differences, usual = _usual_differences(torch.where(slow, torch.nan, times)[:, begin:], threshold)
        reference = _reference(times, usual[:, None] & ~slow, of_all)
        log_ratio = torch.log(times / reference).nan_to_num(torch.nan, torch.nan, -10.0)
        slow = torch.zeros_like(slow)
        slow[:, begin:] = _find(log_ratio[:, begin:] - differences[:, None], limit)
    reference = _reference(times, ~slow, of_all)
    stragglers = [
        _describe(rank, times[rank], reference[rank], slow[rank], begin)
        for rank in slow.any(1).nonzero().flatten().tolist()
    ]
    stragglers = [straggler for straggler in stragglers if straggler.slowdown >= min_slowdown]
    return sorted(stragglers, key=lambda straggler: -straggler.seconds_lost)


def _listed(values: Any) -> Any:
    return values.tolist() if hasattr(values, "tolist") else values


def _as_table(seconds: Any) -> Tensor:
    """Return `seconds` as float64, shape (steps, ranks), after checking every value."""
    try:
        # As lists, because torch.tensor() takes neither a list of tensors nor an array with negative strides.
        rows = [_listed(row) for row in _listed(seconds)]
        table = torch.tensor(rows or [[]], dtype=torch.float64, device="cpu")
    except (TypeError, ValueError, RuntimeError, OverflowError):
        raise UsageError(
            "seconds must be a dense table of real numbers of shape (steps, ranks); give NaN for a missing time"
        ) from None
    if table.ndim != 2:
        raise UsageError(
            f"seconds has shape {tuple(table.shape)}; give one row for each step and one column for each rank"
        )
    if (bad := ((table < 0) | table.isinf()).nonzero()).numel():
        step, rank = bad[0].tolist()
        raise UsageError(
            f"the time of rank {rank} in step {step} is {table[step, rank].item():g}; give finite seconds >= 0, or NaN "
            "for a missing time"
        )
    return table


def _warm_up(times: Tensor) -> int:
    """Return the number of steps at the start with a median time far above the usual median."""
    typical = times.nanmedian(0).values
    begin = int((typical > 1.5 * typical.nanmedian()).int().cumprod(0).sum())
    return begin if begin <= len(typical) // 3 else 0


def _reference(times: Tensor, peers: Tensor, of_all: Tensor) -> Tensor:
    """Return, for each rank and step, the median over the other `peers`, or `of_all` if there are none."""
    reference = _median_of_others(times, peers)
    # 0 is below the clock's resolution
    return torch.where(reference > 0, reference, torch.where(of_all > 0, of_all, torch.nan))


def _median_of_others(times: Tensor, peers: Tensor) -> Tensor:
    """Return, for each rank and step, the median over the other ranks in `peers`; NaN if there are none."""
    rows = torch.where(peers, times, torch.nan).T.contiguous()
    ordered = rows.sort(dim=1).values  # NaN comes last
    count = (~ordered.isnan()).sum(1, keepdim=True)
    last = rows.shape[1] - 1

    def at(index: Tensor) -> Tensor:
        return ordered.gather(1, index.clamp(0, last))

    without, of_all = torch.zeros_like(rows), torch.zeros_like(rows)
    # A median is the mean of two middle values, which are the same value if the count is odd.
    for middle in ((count - 2) // 2, (count - 1) // 2):
        # Leaving out a rank's own value moves the larger values down by one place.
        without += torch.where(rows <= at(middle), at(middle + 1), at(middle)) / 2
    for middle in ((count - 1) // 2, count // 2):
        of_all += at(middle) / 2
    without = torch.where(count > 1, without, torch.nan)
    return torch.where(rows.isnan(), of_all, without).T.contiguous()


def _usual_differences(times: Tensor, threshold: float) -> tuple[Tensor, Tensor]:
    """Return each rank's natural difference (of logarithms) from the fastest quarter, and which ranks are usual.

    A rank's usual time comes from its fast parts, so a rank that becomes slow is compared with its own past. A rank
    that is slow from the start has no such past, so whether it is usual depends on its distance from the other ranks.
    The natural difference of a rank that is not usual is 0.
    """
    ranks, steps = times.shape
    fastest = _fewest_fast(torch.tensor(ranks, device="cpu")) - 1
    logs = times.clamp(min=1e-9).log()  # a time of 0 is below the clock's resolution
    logs = logs - logs.nanmean(0)
    parts = logs.tensor_split(min(8, max(1, steps // 10)), dim=1)
    levels = torch.stack([_quantile(part, 0.4) for part in parts], dim=1)
    levels = levels - levels.nan_to_num(torch.inf).sort(dim=0).values[fastest]
    level = _quantile(levels, 0.25)
    ordered, order = level.nan_to_num(torch.inf, torch.inf).sort()
    distance = ordered - ordered[fastest]
    gaps = distance.diff(prepend=distance[:1])
    gaps[: fastest + 1] = 0  # the fastest quarter is usual by definition
    chained = (gaps < GAP * threshold).cumprod(0).bool() & (distance < FARTHEST * threshold)
    usual = torch.zeros(ranks, dtype=torch.bool, device="cpu")
    usual[order] = chained | (distance < NEAR * threshold)
    return torch.where(usual, level - ordered[fastest], 0.0).nan_to_num(0.0), usual


def _fewest_fast(ranks: Tensor) -> Tensor:
    """Return the minimum number of ranks that must not be slow: more than a quarter."""
    return (ranks + 5) // 4


def _find(log_ratio: Tensor, minimum: float) -> Tensor:
    """Return the slow steps of each rank, as booleans of shape (ranks, steps).

    The evidence of a step is the amount by which it exceeds half of the smallest slowdown, in standard deviations. A
    rank is a suspect if chance does not explain its stretch with the largest sum of evidence.
    """
    is_known = ~log_ratio.isnan()
    # The 0.1 and 0.3 quantiles of a normal distribution are 0.757 deviations apart, and slow steps hardly move them.
    scale = (_quantile(log_ratio, 0.3) - _quantile(log_ratio, 0.1)).nan_to_num(0.0, 0.0, 0.0) / 0.757
    scale = scale.clamp(min=max(minimum / 2, float(scale.median())))[:, None]
    evidence = ((log_ratio - minimum / 2) / scale).clamp(-CLIP, CLIP).nan_to_num(0.0)
    # Subtract the bias of skewed noise, which has more long steps than short ones on every rank.
    bias = (evidence.sum(1) / is_known.sum(1).clamp(min=1)).quantile(0.25).clamp(min=0.0)
    evidence = (evidence - bias) * is_known
    first, end, gain = _longest_stretch(evidence)
    count = torch.nn.functional.pad(is_known.cumsum(1), (1, 0))
    length = (count.gather(1, end[:, None]) - count.gather(1, first[:, None])).squeeze(1)
    steps = log_ratio.shape[1]
    score = gain / (length.clamp(min=min(FEW, max(1, steps // 3))) * _variance(evidence)).sqrt()
    slow = torch.zeros_like(is_known)
    # With few steps and ranks the estimate of the noise is uncertain, so require a higher score.
    threshold = THRESHOLD + 10 / (steps * (len(score) - 1)) ** 0.5
    for rank in (score > threshold).nonzero().flatten().tolist():
        slow[rank] = _slow_steps(log_ratio[rank], int(first[rank]), int(end[rank]), minimum, float(scale[rank]))
    # If nearly all ranks are slow in a step, that speed counts as usual, and the remaining ranks count as fast.
    return slow & (slow.sum(0) + _fewest_fast(is_known.sum(0)) <= is_known.sum(0))


def _variance(evidence: Tensor) -> float:
    """Return the variance per step that a sum of evidence has by chance: the median over ranks, but at least 1.

    Lasting noise makes this variance larger than that of a single step, so it is estimated from differences between the
    sums of neighboring blocks. A slow stretch affects these differences only at its two ends.
    """
    length = max(SHORTEST, evidence.shape[1] // BLOCKS)
    sums = torch.stack([block.sum(1) for block in evidence.split(length, dim=1)], dim=1)
    if sums.shape[1] < 6:
        return 1.0
    deviations = sums.diff(dim=1).abs().median(1).values * 1.4826 / 2**0.5
    return max(1.0, float(deviations.median()) ** 2 / length)


def _longest_stretch(evidence: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return each rank's stretch with the largest sum of evidence: its first step, its end (exclusive), and the sum."""
    sums = torch.nn.functional.pad(evidence.double().cumsum(1), (1, 0))
    lowest, since = sums.cummin(1)
    gain, end = (sums - lowest).max(1)
    return since.gather(1, end[:, None]).squeeze(1), end, gain


def _slow_steps(log_ratio: Tensor, first: int, end: int, threshold: float, scale: float) -> Tensor:
    """Return a rank's slow steps, given the stretch from `first` to `end` that made it a suspect."""
    is_known = ~log_ratio.isnan()
    slow = torch.zeros_like(is_known)
    inside = log_ratio[first:end][is_known[first:end]]
    above = inside[inside >= threshold]
    if len(above) < max(SHORTEST, SOMETIMES * len(inside)):
        return slow
    border = float(above.median()) / 2
    if float((inside > border).float().mean()) < MOSTLY and border > 1.5 * scale:
        slow[first:end] = log_ratio[first:end] > border
        return slow
    border = max(float(inside.median()), threshold) / 2
    start, stop, _ = _longest_stretch((log_ratio - border).clamp(-border, border).nan_to_num(0.0)[None])
    slow[int(start) : int(stop)] = True
    slow &= is_known
    if int(slow.sum()) < SHORTEST or float(log_ratio[slow].median()) < threshold:
        return torch.zeros_like(slow)
    places = is_known.nonzero().flatten()
    marked = slow[places]
    # The first and last few steps may be spikes, so do not let a rank become slow or recover in them.
    at = marked.nonzero().flatten()
    if int(at[0]) < SHORTEST:
        slow[places[: int(at[0])]] = True
    if int(at[-1]) >= len(places) - SHORTEST:
        slow[places[int(at[-1]) :]] = True
    return slow


def _describe(rank: int, times: Tensor, reference: Tensor, slow: Tensor, begin: int) -> Straggler:
    """Describe the `slow` steps of `rank`; the steps before `begin` are warm-up."""
    measured = (~(times / reference).isnan()).nonzero().flatten()
    judged = slow[measured[measured >= begin]]
    stretches = int(judged[0]) + int((judged.int().diff() == 1).sum())
    if stretches > 1:
        kind = "fluctuating"
    elif judged[-1]:
        kind = "persistent" if judged[0] else "emerging"
    else:
        kind = "recovered"
    steps = slow.nonzero().flatten()
    return Straggler(
        rank=rank,
        first_step=int(measured[0] if judged[0] else steps[0]),
        last_step=int(steps[-1]),
        slowdown=float((times[steps] / reference[steps]).median()),
        kind=kind,
        steps_slow=len(steps),
        seconds_lost=float((times[steps] - reference[steps]).sum()),
    )


def _quantile(values: Tensor, share: float) -> Tensor:
    """Return a quantile of the numbers in each row."""
    ordered = values.sort(dim=1).values  # NaN comes last
    last = ((~ordered.isnan()).sum(1, keepdim=True) - 1).clamp(min=0)
    return ordered.gather(1, (share * last).round().long()).squeeze(1)
