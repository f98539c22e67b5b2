"""Cuts an order of indices into global batches, and each global batch into one slice per rank."""

from __future__ import annotations

from paceline.data.split.speeds import shares_by_speed


class Slice(list[int]):
    """The indices of one slice of a global batch; `share` is the number of the slice, by default the rank."""

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
