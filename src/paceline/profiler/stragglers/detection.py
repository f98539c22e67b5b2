"""Finds stragglers, which are ranks that computed longer than the others, in times of any origin."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from paceline.errors import UsageError
from paceline.profiler.stragglers.relative_times import (
    CLIP,
    FEWEST_PEERS,
    NEAR,
    evidence_of,
    fewest_not_slow,
    longest_stretch,
    median_of_others,
    relative,
    scale_of,
    usual_differences,
    variance_of,
)

THRESHOLD = 4.5
"""Least score that chance does not explain; measured by ``benchmarks/straggler_detection.py``."""
SLOWDOWN = 1.1
"""Smallest slowdown that is named by default."""
SHORTEST = 5
"""Fewest slow steps: in fewer, a slow rank cannot be told from spikes."""
_USUAL_BEST = 3.0
"""Largest lower quartile of the ranks' scores if nothing is slow."""
_NOW_AND_THEN, _MOSTLY = 0.2, 0.7
"""Shares of slow steps from which a stretch counts as slow, and from which all of its steps do."""
_FEW = 15
"""Steps that a shorter stretch is taken to have, so that a few spikes in a row say little."""
_CLEAR, _CLEAR_SHARE = math.log(3.0), 0.9
"""Logarithm of the ratio from which steps are slow whatever the noise, and the share of a stretch that must show it.
Where the others' time drifts, the noise seems to last, and then no score of a short table would be enough."""
_EDGE = 3.0
"""Least score of steps beside a stretch that are less slow."""
_WARM_UP = 1.5
"""Multiple of the usual time on the median rank from which a leading step belongs to the warm-up."""


@dataclass(frozen=True)
class Straggler:
    """A rank that computed longer than the others, at least for a part of the job."""

    rank: int
    name: str | None
    """Name of its rank or host, if names were given."""
    first_step: int
    last_step: int
    """Last slow step, included."""
    slowdown: float
    """Median over its slow steps of its time over the median time of the others that were not slow."""
    kind: str
    """``"persistent"``: slow all the time. ``"emerging"``: slow from `first_step` to the end. ``"recovered"``: slow
    until `last_step` and normal afterwards. ``"fluctuating"``: slow again and again, and normal between."""
    steps_slow: int
    """Number of slow steps; fewer than from `first_step` to `last_step` if it fluctuates, or times are missing."""
    seconds_lost: float
    """Sum over its slow steps of its time less the median of the others."""

    def __str__(self) -> str:
        """Say in one sentence which rank was slow, when, and at which cost."""
        who = f"rank {self.rank}" + (f" ({self.name})" if self.name else "")
        when = {
            "persistent": "in all steps",
            "emerging": f"from step {self.first_step} on",
            "recovered": f"from step {self.first_step} to {self.last_step}",
            "fluctuating": f"in {self.steps_slow} of the steps {self.first_step} to {self.last_step}",
        }[self.kind]
        return (
            f"{who} computed {self.slowdown:.2f}x as long as the median of the others {when}: "
            f"{self.seconds_lost:.3g} s lost, {self.kind}"
        )


def find_stragglers(
    seconds: Any, names: Sequence[str | None] | None = None, *, min_slowdown: float = SLOWDOWN
) -> list[Straggler]:
    """Return the ranks that computed longer than the others, the most costly first.

    Give compute times, not step times: ranks wait for each other, so that a step takes the same time on all of them. A
    rank is named if the median of its slow steps is `min_slowdown` or more and chance does not explain it. A quarter of
    the ranks and one more have to be fast; if fewer are, slow is usual.

    A rank that gets slow is compared with its own past, one that is slow from the start with the fastest quarter of the
    ranks; there, up to 1.15 times as long is a usual difference. docs/stragglers.md has what was measured.

    Args:
        seconds: compute time of each step and rank, shape (steps, ranks): a list, tensor, array or DataFrame.
        names: a name for each rank, such as its host.
        min_slowdown: the smallest slowdown that is named.
    """
    table = _as_table(seconds)
    steps, ranks = table.shape
    if names is not None and len(names) != ranks:
        raise UsageError(f"there are {len(names)} names for {ranks} ranks; give one name for each rank")
    if not (min_slowdown > 1 and math.isfinite(min_slowdown)):
        raise UsageError(f"min_slowdown must be a finite number above 1, not {min_slowdown}")
    if ranks < 2 or steps < SHORTEST:
        return []
    times = table.T.contiguous()
    begin = _warm_up(times)
    least = math.log(min_slowdown)
    slow = torch.zeros_like(times, dtype=torch.bool)
    of_all = _positive(median_of_others(times, ~slow))
    # Stragglers change the usual times, so the next pass leaves them out. The first one finds those that are clear.
    for limit in (NEAR * least, least, least):
        before = slow
        differences, usual = usual_differences(torch.where(slow, torch.nan, times)[:, begin:], least)
        reference = _or(_positive(median_of_others(times, usual[:, None] & ~slow)), of_all)
        slow = _find(relative(times, reference)[:, begin:] - differences[:, None], limit)
        slow = torch.nn.functional.pad(slow, (begin, 0))
        if limit == least and torch.equal(slow, before):
            break
    reference = _or(_positive(median_of_others(times, ~slow)), of_all)
    found = [
        straggler
        for rank, name in enumerate(names if names is not None else [None] * ranks)
        if slow[rank].any()
        and (straggler := _describe(rank, times[rank], reference[rank], slow[rank], begin, name)).slowdown
        >= min_slowdown
    ]
    return sorted(found, key=lambda straggler: -straggler.seconds_lost)


def _as_table(seconds: Any) -> Tensor:
    """Return `seconds` as float64, shape (steps, ranks), after checking every value."""
    try:
        if hasattr(seconds, "to_numpy"):  # a DataFrame; as a sequence it is the list of its columns' names
            seconds = seconds.to_numpy()
        if isinstance(seconds, (list, tuple)):  # a missing time may be None, because JSON has no NaN
            rows = [[math.nan if time is None else float(time) for time in row] for row in seconds]
            table = torch.tensor(rows, dtype=torch.float64)
        elif isinstance(seconds, Tensor):
            table = seconds.detach().cpu()
        else:
            # By the array's own method: torch and Paceline work without NumPy, too.
            table = torch.as_tensor(seconds.__array__().astype("float64"))
    except (TypeError, ValueError, RuntimeError, AttributeError) as error:
        raise UsageError(
            f"seconds must be numbers of shape (steps, ranks) ({error}); give NaN for a time that is missing"
        ) from None
    if table.ndim == 1 and table.numel() == 0:
        return table.reshape(0, 0)
    if table.is_complex():
        raise UsageError("seconds are complex numbers; give real ones of shape (steps, ranks)")
    table = table.double()
    if table.ndim != 2:
        raise UsageError(
            f"seconds has shape {tuple(table.shape)}; give one row for each step, one column for each rank"
        )
    if (bad := ((table < 0) | table.isinf()).nonzero()).numel():
        step, rank = bad[0].tolist()
        raise UsageError(
            f"the time of rank {rank} in step {step} is {table[step, rank].item():g}; "
            f"give finite seconds >= 0, or NaN where it is missing"
        )
    return table


def _warm_up(times: Tensor) -> int:
    """Return how many leading steps took most ranks much longer than usual; nothing is concluded from them."""
    typical = times.nanmedian(0).values
    steps = len(typical)
    long = typical > _WARM_UP * typical.nanmedian()
    at_most = min(steps // 3, max(10, steps // 10))
    begin = 0
    while begin < at_most and bool(long[begin]):
        begin += 1
    return begin if steps - begin >= SHORTEST else 0


def _positive(reference: Tensor) -> Tensor:
    """Return `reference` with NaN for 0, which is below the clock's resolution: nothing can be compared with it."""
    return torch.where(reference > 0, reference, torch.nan)


def _or(reference: Tensor, other: Tensor) -> Tensor:
    return torch.where(reference.isnan(), other, reference)


def _find(log_ratio: Tensor, least: float) -> Tensor:
    """Return in which steps each rank was slow, as booleans of shape (ranks, steps).

    A rank is a suspect if its evidence, summed over the stretch where that sum is largest, is too much for chance.
    """
    known = ~log_ratio.isnan()
    scale = scale_of(log_ratio).clamp(min=least / 2)  # a floor, or every microsecond would count without noise
    evidence = evidence_of(log_ratio, scale, least)
    first, end, gain = longest_stretch(evidence)
    counts = torch.nn.functional.pad(known.cumsum(1), (1, 0))
    length = (counts.gather(1, end[:, None]) - counts.gather(1, first[:, None])).squeeze(1)
    variance = variance_of(evidence, log_ratio, scale)
    score = gain / (length.clamp(min=min(_FEW, max(1, log_ratio.shape[1] // 3))) * variance).sqrt()
    if len(score) >= FEWEST_PEERS:  # a score that most ranks reach is a property of the noise
        score = score / (score.quantile(0.25) / _USUAL_BEST).clamp(min=1.0)
    steps = log_ratio.shape[1]
    slow = torch.zeros_like(known)
    # A higher threshold for few steps, from which the noise is known less well.
    suspects = (score > THRESHOLD + 25 / steps) | _are_clear(log_ratio, first, end)
    for rank in suspects.nonzero().flatten().tolist():
        places = known[rank].nonzero().flatten()
        start, stop = torch.searchsorted(places, torch.stack([first[rank], end[rank]])).tolist()
        mask = _slow_steps(log_ratio[rank][places], start, stop, least, float(scale[rank]), float(variance[rank]))
        if mask.sum() >= SHORTEST:
            slow[rank, places[mask]] = True
    # Where nearly all ranks are slow, that is usual, and the others are fast.
    return slow & (slow.sum(0) + fewest_not_slow(known.sum(0)) <= known.sum(0))


def _are_clear(log_ratio: Tensor, first: Tensor, end: Tensor) -> Tensor:
    """Return for which ranks the steps from `first` to `end` are slow beyond doubt."""
    steps = torch.arange(log_ratio.shape[1])
    inside = (steps >= first[:, None]) & (steps < end[:, None]) & ~log_ratio.isnan()
    known, clear = inside.sum(1), (inside & (log_ratio >= _CLEAR)).sum(1)
    return (known >= max(SHORTEST, min(_FEW, len(steps) // 3))) & (clear >= _CLEAR_SHARE * known)


def _slow_steps(log_ratio: Tensor, first: int, end: int, least: float, scale: float, variance: float) -> Tensor:
    """Return which steps of one rank were slow, given the stretch from `first` to `end` that made it a suspect."""
    inside = log_ratio[first:end]
    above = inside[inside >= least]
    slow = torch.zeros_like(log_ratio, dtype=torch.bool)
    if len(above) < max(SHORTEST, _NOW_AND_THEN * len(inside)):
        return slow
    border = float(above.median()) / 2
    if (inside > border).float().mean() < _MOSTLY and border > 1.5 * scale:  # now and then, and not by the noise
        slow[first:end] = inside > border
        return slow
    border = max(float(inside.median()), least) / 2
    start, stop = (int(place) for place in longest_stretch((log_ratio - border).clamp(-border, border)[None])[:2])
    slow[start:stop] = float(log_ratio[start:stop].median()) >= least
    # Where a rank gets slower bit by bit, it is slow before it is half as slow as later.
    for edge in (slice(first, start), slice(stop, end)):
        more = ((log_ratio[edge] - least / 2) / scale).clamp(-CLIP, CLIP)
        if len(more) >= SHORTEST and float(more.sum()) > _EDGE * (len(more) * variance) ** 0.5 and slow.any():
            wider = slow.clone()
            wider[edge] = True
            if float(log_ratio[wider].median()) >= least:
                slow = wider
    where = slow.nonzero().flatten().tolist()
    # So few steps at an edge cannot be told from spikes, so they do not make a rank's slowness begin or end.
    if where and where[0] < SHORTEST:
        slow[: where[0]] = True
    if where and where[-1] >= len(slow) - SHORTEST:
        slow[where[-1] :] = True
    return slow


def _describe(rank: int, times: Tensor, reference: Tensor, slow: Tensor, begin: int, name: str | None) -> Straggler:
    """Describe the steps in which `rank` was `slow`; those before `begin` were its warm-up."""
    known = (~(times / reference).isnan()).nonzero().flatten()
    judged = known[known >= begin]
    of_judged = slow[judged]
    runs = int(of_judged[0]) + int((of_judged.int().diff() == 1).sum())
    at_start, at_end = bool(of_judged[0]), bool(of_judged[-1])
    if runs > 1:
        kind = "fluctuating"
    elif at_end:
        kind = "persistent" if at_start else "emerging"
    else:
        kind = "recovered"
    where = slow.nonzero().flatten()
    return Straggler(
        rank=rank,
        name=name,
        first_step=int(known[0] if at_start else where[0]),
        last_step=int(where[-1]),
        slowdown=float((times[where] / reference[where]).median()),
        kind=kind,
        steps_slow=len(where),
        seconds_lost=float((times[where] - reference[where]).sum()),
    )
