"""Slices in proportion to the ranks' speeds, so that a slower rank gets fewer samples.

If rank r computes v_r samples per second, a step of B samples takes at least B / Σ v. This bound is reached if all
ranks finish at the same time. With equal slices it takes B / (N · min v). See decision 0054.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

from paceline.errors import UsageError


@lru_cache(maxsize=64)
def shares_by_speed(count: int, speeds: tuple[float, ...]) -> tuple[int, ...]:
    """Return each rank's number of samples, out of `count`: whole numbers in proportion to `speeds`.

    Fractions are rounded by largest remainder, and ties go to the first ranks, so equal speeds give the same numbers as
    :func:`~.partition.slice_bounds`. Every rank gets at least one sample if there are enough; otherwise the fastest
    ranks get one each.
    """
    ranks = range(len(speeds))
    if count < len(speeds):
        fastest = sorted(ranks, key=lambda rank: (-speeds[rank], rank))[:count]
        return tuple(int(rank in fastest) for rank in ranks)
    largest = max(speeds)
    scaled = [speed / largest for speed in speeds]  # so that the sum is finite
    free, quotas = list(ranks), [0.0]
    while min(quotas) < 1:  # ranks with less than one sample get one, and the others share the rest
        remaining, total = count - len(speeds) + len(free), math.fsum(scaled[rank] for rank in free)
        quotas = [remaining * scaled[rank] / total for rank in free]
        free = [rank for rank, quota in zip(free, quotas, strict=True) if quota >= 1]
    shares = [1] * len(speeds)
    remainders = []
    for rank, quota in zip(free, quotas, strict=True):
        shares[rank] = int(quota)
        remainders.append((int(quota) - quota, rank))
    for _, rank in sorted(remainders)[: count - sum(shares)]:
        shares[rank] += 1
    return tuple(shares)


def checked_speeds(speed: Sequence[float] | None, world_size: int, batch_size: int) -> tuple[float, ...] | None:
    """Check the ranks' speeds and return them; None for equal slices or a single rank."""
    if speed is None:
        return None
    remedy = "give a number > 0 for each rank, such as [2, 1, 1]"
    try:
        speeds = tuple(float(value) for value in speed)
    except (TypeError, ValueError):
        raise UsageError(f"speed={speed!r} is not a list of numbers; {remedy}") from None
    if len(speeds) != world_size:
        raise UsageError(f"speed={list(speeds)} has {len(speeds)} speeds for {world_size} ranks; {remedy}")
    for rank, value in enumerate(speeds):
        if not 0 < value < math.inf:
            raise UsageError(f"the speed of rank {rank} is {value:g}; {remedy}")
    if batch_size < world_size:
        raise UsageError(
            f"a global batch of {batch_size} samples cannot be cut by speed among {world_size} ranks; give a "
            f"batch_size of at least {world_size}, or leave speed out"
        )
    return speeds if world_size > 1 else None
