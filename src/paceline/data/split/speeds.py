"""Speeds of ranks, by which global batches are cut into slices, so that a slower rank gets fewer samples.

If rank r computes v_r samples a second, no split of B samples ends before B / Σ v: the harmonic ideal, in which all
ranks are busy to the end. Equal slices end after B / (N · min v).

Decision 0054 says why.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Literal

from paceline.errors import UsageError

Speed = Literal["measured"] | Sequence[float]
MEASURED = "measured"
LEAST_GAIN = 0.03
"""Gain in speed that is expected at least from other slices; below it slices stay, or noise would move them."""
_DIGITS = 4
"""Decimal places of measured speeds, the fastest rank's being 1."""
_KEPT = 8
"""Changes of the cuts that are remembered."""


@lru_cache(maxsize=64)
def shares_by_speed(count: int, speeds: tuple[float, ...]) -> tuple[int, ...]:
    """Return the number of samples of each rank, out of `count`: in proportion to `speeds`, but whole.

    Fractions are rounded by the largest remainder, the first ranks first; so equal speeds give the same numbers as
    :func:`~.partition.slice_bounds`. Every rank gets a sample as long as there are enough; if not, the fastest get one.
    """
    ranks = range(len(speeds))
    if count < len(speeds):
        fastest = sorted(ranks, key=lambda rank: (-speeds[rank], rank))[:count]
        return tuple(int(rank in fastest) for rank in ranks)
    largest = max(speeds)
    scaled = [speed / largest for speed in speeds]  # whose sum is finite
    free, quotas = list(ranks), [0.0]
    while min(quotas) < 1:  # ranks with less than a sample get one, and the others share the rest
        left, total = count - len(speeds) + len(free), math.fsum(scaled[rank] for rank in free)
        quotas = [left * scaled[rank] / total for rank in free]
        free = [rank for rank, quota in zip(free, quotas, strict=True) if quota >= 1]
    shares = [1] * len(speeds)
    remainders = []
    for rank, quota in zip(free, quotas, strict=True):
        shares[rank] = int(quota)
        remainders.append((int(quota) - quota, rank))
    for _, rank in sorted(remainders)[: count - sum(shares)]:
        shares[rank] += 1
    return tuple(shares)


def decide(
    speeds: tuple[float, ...], seconds: Sequence[float | None], batch_size: int
) -> tuple[tuple[float, ...], float] | None:
    """Return the speeds by which to cut from now on, and the speedup that is expected; None to leave them as they are.

    A plain function of values that all ranks know, so all of them decide alike.

    Args:
        speeds: the speeds by which batches are cut now.
        seconds: seconds that each rank computes for a sample (or a unit of cost); None where that is not known.
        batch_size: samples in a global batch.
    """
    if any(one is None or not 0 < one < math.inf for one in seconds):
        return None
    known = [one for one in seconds if one is not None]
    fastest = min(known)
    new = tuple(max(round(fastest / one, _DIGITS), 10.0**-_DIGITS) for one in known)

    def length(by: tuple[float, ...]) -> float:
        return max(share * one for share, one in zip(shares_by_speed(batch_size, by), known, strict=True))

    speedup = length(speeds) / length(new)
    return (new, speedup) if speedup > 1 + LEAST_GAIN else None


class Cuts:
    """The speeds by which global batches are cut, and the batch of an epoch from which each holds.

    Equal on every rank: speeds are the user's, or agreed on by all ranks.

    Args:
        speed: ``"measured"``, which begins with equal ones, or a speed for each rank.
        world_size: the number of ranks.
    """

    is_measured: bool
    """Whether speeds are measured."""
    changes: list[tuple[int, int, tuple[float, ...]]]
    """Epoch, number of the batch, and the speeds from there on, ascending; the first also hold for all before it."""

    def __init__(self, speed: Speed, world_size: int) -> None:
        self.is_measured, self._size = speed == MEASURED, world_size
        speeds = (1.0,) * world_size if self.is_measured else tuple(map(float, speed))
        self.changes = [(0, 0, speeds)]

    def at(self, epoch: int, number: int) -> tuple[float, ...]:
        """Return the speeds that batch `number` of `epoch` is cut by."""
        return self.changes[max(0, self._index(epoch, number))][2]

    def change(self, epoch: int, number: int, speeds: tuple[float, ...]) -> None:
        """Cut by `speeds` from batch `number` of `epoch` on; changes that were to come later are dropped."""
        kept = [change for change in self.changes if change[:2] < (epoch, number)]
        # The last few are enough: a pass that was left begins again where its last step ended.
        self.changes = [*kept, (epoch, number, speeds)][-_KEPT:]

    def state(self, epoch: int, number: int) -> list[list[Any]]:
        """Return the changes that hold from batch `number` of `epoch` on, as JSON."""
        return [[*place, list(speeds)] for *place, speeds in self.changes[max(0, self._index(epoch, number)) :]]

    def load(self, state: Sequence[Sequence[Any]]) -> None:
        """Go on with the changes of a :meth:`state`, unless speeds are given, or are of another number of ranks."""
        changes = [(int(epoch), int(number), tuple(map(float, speeds))) for epoch, number, speeds in state]
        if not all(0 < one < math.inf for _, _, speeds in changes for one in speeds):
            raise ValueError(f"speeds={state!r}")
        if self.is_measured and changes and all(len(speeds) == self._size for _, _, speeds in changes):
            self.changes = changes

    def _index(self, epoch: int, number: int) -> int:
        """Return the index of the last change at or before batch `number` of `epoch`; -1 if there is none."""
        return sum(change[:2] <= (epoch, number) for change in self.changes) - 1


def cuts_of(speed: Speed | None, world_size: int, batch_size: int) -> Cuts | None:
    """Return the cuts by `speed`; None where slices are equal, or there is one rank."""
    if speed is None:
        return None
    remedy = 'give speed="measured", or a number > 0 for each rank, such as [2, 1, 1]'
    if isinstance(speed, str):
        if speed != MEASURED:
            raise UsageError(f"speed={speed!r} is unknown; {remedy}")
    else:
        try:
            speed = [float(one) for one in speed]
        except (TypeError, ValueError):
            raise UsageError(f"speed={speed!r} is no list of numbers; {remedy}") from None
        if len(speed) != world_size:
            raise UsageError(f"speed={speed} has {len(speed)} speeds for {world_size} ranks; {remedy}")
        for rank, one in enumerate(speed):
            if not 0 < one < math.inf:
                raise UsageError(f"the speed of rank {rank} is {one:g}; {remedy}")
    if batch_size < world_size:
        raise UsageError(
            f"a global batch of {batch_size} samples cannot be cut by speed among {world_size} ranks; give a "
            f"batch_size of at least {world_size}, so that every rank has a sample, or leave speed out"
        )
    return Cuts(speed, world_size) if world_size > 1 else None
