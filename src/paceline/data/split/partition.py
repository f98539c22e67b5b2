"""Cuts an order of indices into global batches, including the last one, and each global batch into slices.

If samples have costs, ``balance.py`` assigns them to slices instead.
"""

from __future__ import annotations

from collections.abc import Sequence

from paceline.core.state.virtual_ranks import slices_of_rank
from paceline.data.split.speeds import checked_speeds, shares_by_speed
from paceline.errors import UsageError


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
        self.unlike_by = "" if speed is None else "speed"
        """Name of the argument that makes slices differ in length; empty if there is none."""
        self.speeds = checked_speeds(speed, world_size, batch_size)
        """The ranks' speeds; None if slices do not depend on them."""

    def shares(self, virtual_ranks: int | None) -> tuple[int, Sequence[int]]:
        """Return the number of slices of a global batch, and the numbers of this rank's slices.

        Without virtual ranks, each rank has one slice, numbered by the rank.
        """
        if virtual_ranks is None:
            return self._world_size, (self._rank,)
        if self.unlike_by:
            raise UsageError(
                f"{self.unlike_by}= cuts batches into slices of different lengths and virtual_ranks={virtual_ranks} "
                "into equal ones; leave one of the two out"
            )
        if not 1 <= virtual_ranks <= self._batch_size:
            raise UsageError(
                f"a global batch of {self._batch_size} samples cannot be cut into virtual_ranks={virtual_ranks} "
                f"slices; give 1 to {self._batch_size} slices, or a larger batch_size"
            )
        return virtual_ranks, slices_of_rank(virtual_ranks, self._rank, self._world_size)
