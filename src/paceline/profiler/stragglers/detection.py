"""Stragglers: ranks that computed longer than the others, found in times alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from paceline.errors import UsageError
from paceline.profiler.stragglers.relative_times import FEWEST_PEERS, RelativeTimes, compare, median_of_others
from paceline.profiler.stragglers.slow_steps import slow_steps
from paceline.profiler.stragglers.slow_windows import SHORTEST, refine, scan

THRESHOLD = 6.0
"""Score from which a window is no chance; measured by ``benchmarks/straggler_detection.py``."""
_PASSES = 3  # of comparing with the others, each without the stragglers of the one before
_WARM_UP = 3.0  # times as long as usual on the median rank makes a leading step one of the warm-up


@dataclass(frozen=True)
class Straggler:
    """A rank that computed longer than the others, at least for a part of the job."""

    rank: int
    name: str | None
    """The name of its rank or host, if names were given."""
    first_step: int
    last_step: int
    """The last slow step, included."""
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
        """Say in one sentence who was slow, when, and what it cost."""
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
    seconds: Any, names: Sequence[str | None] | None = None, *, min_slowdown: float | None = None
) -> list[Straggler]:
    """Return the ranks that computed longer than the others, the most costly first.

    Give compute times, not step times: ranks wait for each other, so that a step takes all of them as long. A rank is
    named if the median of its slow steps is `min_slowdown` or more and chance does not explain it. At most half of the
    ranks can be slow in a step; if more are, that is usual, and the others are fast.

    False alarms, as measured by ``benchmarks/straggler_detection.py`` over jobs of 20 to 2,000 steps, 2 to 512 ranks:
    none in 949 jobs with log-normal noise of 1 % and 5 %, 2 in 475 with 20 %, and none in 871 with Student's t with
    3 degrees of freedom. More where noise lasts: a rank that happens to be slow in all of 20 steps is named
    (docs/stragglers.md has the tables).

    Args:
        seconds: compute time of each step and rank, shape (steps, ranks): a list, tensor, array or DataFrame.
        names: a name for each rank, such as its host.
        min_slowdown: the smallest slowdown that is named; by default 1.025, and 1.05 for fewer than five ranks, whose
            natural differences cannot be told from one slow rank.

    Raises:
        UsageError: if a time is negative or infinite, naming step and rank, or a shape does not fit.
    """
    table = _as_table(seconds)
    steps, ranks = table.shape
    if names is not None and len(names) != ranks:
        raise UsageError(f"there are {len(names)} names for {ranks} ranks; give one name for each rank")
    if min_slowdown is None:
        min_slowdown = 1.025 if ranks >= FEWEST_PEERS else 1.05
    if not (min_slowdown > 1 and math.isfinite(min_slowdown)):
        raise UsageError(f"min_slowdown must be a finite number above 1, not {min_slowdown}")
    if ranks < 2 or steps < SHORTEST:
        return []
    times = table.T.contiguous()
    begin = _warm_up(times)
    least = math.log(min_slowdown)
    slow = torch.zeros_like(times, dtype=torch.bool)
    reference = first_reference = _positive(median_of_others(times, ~slow))
    for _ in range(_PASSES):
        before = slow
        slow = _find(compare(times[:, begin:], reference[:, begin:]), least)
        slow = torch.nn.functional.pad(slow, (begin, 0))
        if torch.equal(slow, before):
            break
        reference = _positive(median_of_others(times, ~slow))
        reference = torch.where(reference.isnan(), first_reference, reference)
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
        if hasattr(seconds, "to_numpy"):  # a DataFrame, which as a sequence is that of its columns' names
            seconds = seconds.to_numpy()
        if isinstance(seconds, (list, tuple)):  # None for a missing time, as JSON has it
            rows = [[math.nan if time is None else float(time) for time in row] for row in seconds]
            table = torch.tensor(rows, dtype=torch.float64)
        elif isinstance(seconds, Tensor):
            table = seconds.detach().cpu()
        else:
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


def _find(times: RelativeTimes, least: float) -> Tensor:
    """Return in which steps each rank was slow, as booleans of shape (ranks, steps)."""
    slow = torch.zeros_like(times.log_ratio, dtype=torch.bool)
    found = scan(times, least / 2)
    steps = slow.shape[1]
    fewest = max(SHORTEST, min(steps // 100, 20))
    limit = THRESHOLD + 25 / steps  # the noise itself is known less well from few steps
    suspects = torch.maximum(found.score, found.fluctuating) > limit
    for rank in suspects.nonzero().flatten().tolist():
        known = (~times.log_ratio[rank].isnan()).nonzero().flatten()
        window = (0, len(known))
        if found.score[rank] > limit:
            first, end = torch.searchsorted(known, found.window[rank]).tolist()
            window = refine(found.evidence[rank][known], first, end)
        log_ratio = times.log_ratio[rank][known]
        mask = slow_steps(log_ratio, times.scale[rank][known], window, least, found.persistence)
        if mask.sum() >= fewest and log_ratio[mask].median() >= least:
            slow[rank, known[mask]] = True
    # Where most ranks are slow, that is usual, and the others are fast.
    return slow & (2 * slow.sum(0) <= (~times.log_ratio.isnan()).sum(0))


def _describe(rank: int, times: Tensor, reference: Tensor, slow: Tensor, begin: int, name: str | None) -> Straggler:
    """Return what the steps in which `rank` was `slow` amount to; those before `begin` were its warm-up."""
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
