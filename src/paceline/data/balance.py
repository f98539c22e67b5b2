"""Splits global batches among ranks by the cost of samples, so that no rank waits for a rank with longer samples."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from paceline.core.rng import fork_cpu_rng
from paceline.core.stacks import warn
from paceline.errors import UsageError

Cost = Sequence[float] | torch.Tensor | Callable[[Any], float]


def split_by_cost(
    costs: Sequence[float], world_size: int, loads: Sequence[float] | None = None, speeds: Sequence[float] | None = None
) -> tuple[list[list[int]], list[float]]:
    """Split samples among ranks by the longest-processing-time rule.

    The most expensive remaining sample goes to the rank with the smallest load. Starting from empty loads, the largest
    load is at most 4/3 - 1/(3 * world_size) times the largest load of the best split (Graham, "Bounds on
    Multiprocessing Timing Anomalies", SIAM J. Appl. Math. 17, 1969). Every rank gets a sample if there are enough,
    regardless of its load.

    With `speeds`, the sample goes to the rank that would finish it first. Starting from empty loads, this takes less
    than twice the time of the best split (Gonzalez, Ibarra and Sahni, "Bounds for LPT Schedules on Uniform Processors",
    SIAM J. Comput. 6, 1977).

    Args:
        costs: one finite number >= 0 for each sample of a global batch.
        world_size: the number of ranks.
        loads: the load that each rank already has from earlier micro-batches of the same step; 0 by default.
        speeds: the load that each rank processes per unit of time; equal by default.

    Returns:
        For each rank, the positions of its samples in `costs` in ascending order; and each rank's load, including
        `loads`.
    """
    totals = list(loads) if loads is not None else [0.0] * world_size
    shares: list[list[int]] = [[] for _ in range(world_size)]
    empty = set(range(world_size))

    def finish(rank: int, cost: float) -> float:
        return totals[rank] if speeds is None else (totals[rank] + cost) / speeds[rank]

    for placed, place in enumerate(sorted(range(len(costs)), key=lambda place: (-costs[place], place))):
        # If the remaining samples are just enough for the ranks without a sample, these ranks get them.
        candidates = empty if len(empty) >= len(costs) - placed else range(world_size)
        # For equal loads, prefer the rank with fewer samples, so that samples without cost are also spread.
        rank = min(candidates, key=lambda rank: (finish(rank, costs[place]), len(shares[rank]), rank))
        shares[rank].append(place)
        totals[rank] += costs[place]
        empty.discard(rank)
    return [sorted(share) for share in shares], totals


def split_by_padded_cost(
    costs: Sequence[float], world_size: int, loads: Sequence[float] | None = None, speeds: Sequence[float] | None = None
) -> tuple[list[list[int]], list[float]]:
    """Split samples among ranks for padded batches, whose cost is their number of samples times their largest cost.

    The samples are sorted by descending cost and cut into one contiguous group per rank. No other split is better,
    because exchanging samples until groups are contiguous increases no group's cost. Bisection over the largest load
    finds the cuts: each rank takes as many of the remaining samples as fit under it. This minimizes the largest load if
    ranks start empty and have equal speeds. Ranks that already have loads take their groups in ascending order of load,
    and the result may not be optimal. With `speeds`, loads are in units of time. Every rank gets a sample if there are
    enough.

    Arguments and result are the same as for :func:`split_by_cost`, with padded loads.
    """
    totals = list(loads) if loads is not None else [0.0] * world_size
    by = [1.0] * world_size if speeds is None else speeds
    order = sorted(range(len(costs)), key=lambda place: (-costs[place], place))
    ranks = sorted(range(world_size), key=lambda rank: (totals[rank] / by[rank], rank))
    descending = [costs[place] for place in order]
    ends = _cuts(descending, [totals[rank] for rank in ranks], [by[rank] for rank in ranks])
    shares: list[list[int]] = [[] for _ in range(world_size)]
    for rank, start, end in zip(ranks, [0, *ends], ends, strict=False):
        shares[rank] = sorted(order[start:end])
        totals[rank] += (end - start) * costs[order[start]] if end > start else 0.0
    return shares, totals


def _cuts(descending: Sequence[float], loads: Sequence[float], speeds: Sequence[float]) -> list[int]:
    """Return the ends of contiguous groups of samples such that the largest load is small."""
    count = len(descending)
    low = max(load / speed for load, speed in zip(loads, speeds, strict=True))
    high = low + (count + 1) * max(descending, default=0.0) / min(speeds)  # enough for any rank to take all samples
    best = _groups_below(math.inf, descending, loads, speeds)  # all samples, even if costs vanish
    for _ in range(60):  # until the limits differ only by rounding
        middle = (low + high) / 2
        groups = _groups_below(middle, descending, loads, speeds)
        if groups[-1] == count:
            best, high = groups, middle
        else:
            low = middle
    return best


def _groups_below(
    limit: float, descending: Sequence[float], loads: Sequence[float], speeds: Sequence[float]
) -> list[int]:
    """Return the ends of groups with loads below `limit`; every rank takes a sample if there are enough."""
    ends, assigned = [], 0
    for later, load, speed in zip(range(len(loads) - 1, -1, -1), loads, speeds, strict=True):
        remaining = len(descending) - assigned
        if remaining:
            cost = descending[assigned]
            fitting = remaining if cost <= 0 else int(min(max(0.0, limit * speed - load) / cost, remaining))
            # Take at least one sample, and leave one for each later rank, if there are enough.
            assigned += min(max(fitting, 1), max(remaining - later, 1))
        ends.append(assigned)
    return ends


def costs_of(cost: Cost, dataset: Any, size: int) -> torch.Tensor:
    """Return each sample's cost, shape (size,), float64; a function is called once per sample of `dataset`."""
    if callable(cost):
        if isinstance(dataset, int):
            raise UsageError(
                "cost is a function of a sample, but the sampler got a number of samples; give it the dataset"
            )
        with fork_cpu_rng():  # augmentation may draw from the rank's random streams
            users_costs: Any = [cost(dataset[index]) for index in range(size)]
    else:
        users_costs = cost
    try:
        costs = torch.as_tensor(users_costs, dtype=torch.float64, device="cpu")
    except (TypeError, ValueError, RuntimeError) as error:
        raise UsageError(f"cost must be one number for each sample, or a function that returns it ({error})") from None
    if costs.shape != (size,):
        raise UsageError(f"cost has shape {tuple(costs.shape)} for {size} samples; give one number for each sample")
    if (bad := (~costs.isfinite() | (costs < 0)).nonzero().flatten()).numel():
        index = int(bad[0])
        raise UsageError(
            f"the cost of sample {index} is {costs[index].item():g}; give finite numbers >= 0, such as its length"
        )
    return costs


def warn_if_equal(costs: torch.Tensor) -> None:
    """Warn if all samples have the same cost, such as ``len((x, y))``, which is always 2."""
    if len(costs) > 1 and bool((costs == costs[0]).all()):
        warn(
            f"all {len(costs)} samples cost {costs[0].item():g}, so cost= changes nothing; give a cost that differs "
            "between samples, such as the length of a field: cost=lambda sample: len(sample[0])"
        )
