"""The order of a dataset's indices in each epoch, cut into global batches and each global batch into slices.

If samples have costs, ``balance.py`` assigns them to slices instead.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch

from paceline.core.data_position import short
from paceline.core.digests import quick_digest
from paceline.core.rng import derive_seed, epoch_order, fork_cpu_rng, seed_cpu
from paceline.core.virtual_ranks import slices_of_rank
from paceline.errors import UsageError

Indices = Sequence[int] | torch.Tensor


class EpochOrder:
    """The order of each epoch: sequential, shuffled by (seed, epoch), or user-defined.

    Args:
        size: number of samples in the dataset; may change between epochs.
        users: a user-defined order, or a function that maps an epoch to an order; None for a sequential or shuffled
            order.
        shuffle: whether the order is shuffled.
        seed: determines the permutations, and seeds the global generators for the user's function.
    """

    def __init__(self, size: int, users: Indices | Callable[[int], Indices] | None, shuffle: bool, seed: int) -> None:
        self.size, self.users, self._shuffle, self._seed = size, users, shuffle, seed
        self._cached: tuple[int, int, torch.Tensor] | None = None  # epoch, size and indices of the latest order

    def of(self, epoch: int) -> torch.Tensor:
        """Return the indices of an epoch, shape (samples,), int64. The result for the latest epoch is cached."""
        if self._cached is None or self._cached[:2] != (epoch, self.size):
            self._cached = (epoch, self.size, self._make(epoch))
        return self._cached[2]

    def length(self, epoch: int) -> int:
        """Return the number of indices of an epoch."""
        return self.size if self.users is None else len(self.of(epoch))

    def fingerprint(self, epoch: int) -> str | None:
        """Return a fingerprint of the user's order, to be saved; None if (seed, epoch) determines the order."""
        return None if self.users is None else hashlib.sha256(self.of(epoch).numpy().tobytes()).hexdigest()[:16]

    def digest(self, epoch: int) -> int:
        """Return a digest of the user's order or, without one, of `shuffle`; ranks compare it along with the seed."""
        return int(self._shuffle) if self.users is None else short(int(quick_digest(self.of(epoch))))

    def _make(self, epoch: int) -> torch.Tensor:
        if self.users is None:
            return epoch_order(self.size, self._seed, epoch) if self._shuffle else torch.arange(self.size, device="cpu")
        if not callable(self.users):
            return _checked(self.users, self.size, epoch)
        with fork_cpu_rng():  # the same random numbers on every rank and after a resume
            seed_cpu(derive_seed("order", self._seed, epoch))
            return _checked(self.users(epoch), self.size, epoch)


def _checked(users_order: Any, size: int, epoch: int) -> torch.Tensor:
    """Check the user's order, and return it as int64 indices."""
    if not (hasattr(users_order, "__len__") and hasattr(users_order, "__getitem__")):
        raise UsageError(
            f"order must be a sequence of indices, or a function of the epoch that returns one, not a "
            f"{type(users_order).__name__}; for a sampler give a function, such as lambda epoch: list(sampler)"
        )
    if len(users_order) == 0:
        raise UsageError(f"the order of epoch {epoch} is empty; give at least one index")
    order = torch.as_tensor(users_order, device="cpu")
    if order.dim() != 1 or order.is_floating_point() or order.dtype == torch.bool:
        raise UsageError(
            f"the order of epoch {epoch} has dtype {order.dtype} and shape {tuple(order.shape)}; give whole numbers"
        )
    low, high = int(order.min()), int(order.max())
    if low < 0 or high >= size:
        raise UsageError(
            f"the order of epoch {epoch} has index {low if low < 0 else high}, but the dataset has {size} "
            f"samples; give indices in 0..{size - 1}"
        )
    return order.to(torch.int64)


class Slice(list[int]):
    """The indices of one slice of a global batch; `share` is the number of the slice, by default the rank."""

    example: int | None = None
    """Index of the sample that becomes the model for an empty batch; None if none is needed."""

    def __init__(self, indices: list[int], epoch: int, number: int, share: int) -> None:
        super().__init__(indices)
        self.epoch = epoch
        self.number = number
        self.share = share


def batch_count(length: int, batch_size: int, drop_last: bool) -> int:
    """Return the number of global batches of `batch_size` in an order of `length` indices."""
    return length // batch_size if drop_last else -(-length // batch_size)


def batch_bounds(number: int, length: int, batch_size: int) -> tuple[int, int]:
    """Return the bounds of global batch `number` in an order of `length` indices; the last batch may be short."""
    return min(number * batch_size, length), min((number + 1) * batch_size, length)


def slice_bounds(length: int, rank: int, world_size: int, speeds: tuple[float, ...] | None = None) -> tuple[int, int]:
    """Return the bounds of `rank`'s slice of `length` samples.

    The ranks' slices are adjacent, without gaps or overlaps. Their lengths are in proportion to `speeds`. Without
    speeds they differ by at most one sample, and the first ranks have the longer slices.
    """
    if speeds is not None:
        shares = shares_by_speed(length, speeds)
        begin = sum(shares[:rank])
        return begin, begin + shares[rank]
    share, longer = divmod(length, world_size)
    begin = rank * share + min(rank, longer)
    return begin, begin + share + (rank < longer)


class Slicing:
    """One slice per rank, of equal length or by speed; with virtual ranks, equal slices, the same number per rank."""

    def __init__(self, batch_size: int, rank: int, world_size: int, speed: Sequence[float] | None) -> None:
        self._batch_size, self._rank, self._world_size = batch_size, rank, world_size
        self.unequal_by = "" if speed is None else "speed"
        """Name of the argument that makes slices differ in length; empty if there is none."""
        self.speeds = checked_speeds(speed, world_size, batch_size)
        """The ranks' speeds; None if slices do not depend on them."""

    def shares(self, virtual_ranks: int | None) -> tuple[int, Sequence[int]]:
        """Return the number of slices of a global batch, and the numbers of this rank's slices.

        Without virtual ranks, each rank has one slice, numbered by the rank.
        """
        if virtual_ranks is None:
            return self._world_size, (self._rank,)
        if self.unequal_by:
            raise UsageError(
                f"{self.unequal_by}= cuts batches into slices of different lengths and virtual_ranks={virtual_ranks} "
                "into equal ones; leave one of the two out"
            )
        if not 1 <= virtual_ranks <= self._batch_size:
            raise UsageError(
                f"a global batch of {self._batch_size} samples cannot be cut into virtual_ranks={virtual_ranks} "
                f"slices; give 1 to {self._batch_size} slices, or a larger batch_size"
            )
        return virtual_ranks, slices_of_rank(virtual_ranks, self._rank, self._world_size)


@lru_cache(maxsize=64)
def shares_by_speed(count: int, speeds: tuple[float, ...]) -> tuple[int, ...]:
    """Return each rank's number of samples, out of `count`: whole numbers in proportion to `speeds`.

    If rank r computes v_r samples per second, a step of B samples takes at least B / Σ v. This bound is reached if all
    ranks finish at the same time. With equal slices it takes B / (N · min v). See decision 0054.

    Fractions are rounded by largest remainder, and ties go to the first ranks, so equal speeds give the same numbers as
    :func:`slice_bounds`. Every rank gets at least one sample if there are enough; otherwise the fastest
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
            f"batch_size of at least {world_size}, or remove speed="
        )
    return speeds if world_size > 1 else None
