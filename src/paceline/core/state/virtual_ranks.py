"""Virtual ranks: the slices into which a global batch is cut, whatever the number of ranks that compute them.

Rank r of N computes the V/N slices from r·V/N on, one after the other.

Decision 0055 says why.
"""

from __future__ import annotations

from collections.abc import Iterable
from operator import index
from typing import Any, SupportsIndex

from paceline.core.state.rng import derive_seed, seed_all
from paceline.errors import UsageError


def check_virtual_ranks(name: str, count: Any) -> int:
    """Return the number of virtual ranks, if it is a power of two."""
    is_whole = isinstance(count, SupportsIndex) and not isinstance(count, bool)
    if not is_whole or index(count) < 1 or index(count) & (index(count) - 1):
        raise UsageError(
            f"{name} must be a power of two, so that every number of ranks that divides it sums in one tree, not "
            f"{count!r}; give 2, 4, 8, …"
        )
    return index(count)


def check_same_count(owner: str, before: int | None, count: int) -> None:
    """Refuse `count` virtual ranks where `owner` had another number `before`."""
    if before not in (None, count):
        raise UsageError(
            f"{owner} has virtual_ranks={before}, but {count} are asked for; give loader and model one number"
        )


def virtual_ranks_of(object: Any) -> int:
    """Return the number of virtual ranks of a wrapper or a loader; 0 for anything without them."""
    count = getattr(object, "virtual_ranks", None)
    return count if isinstance(count, int) else 0


def slices_of_rank(count: int, rank: int, size: int) -> range:
    """Return the numbers of the slices that `rank` computes, of `count` in all."""
    if count % size:
        fitting = " or ".join(str(2**power) for power in range(count.bit_length()))
        raise UsageError(f"{size} ranks do not divide virtual_ranks={count}; start {fitting}")
    share = count // size
    return range(rank * share, (rank + 1) * share)


def seed_of_slice(seed: int, epoch: int, batch: int, slice_number: int) -> int:
    """Return the seed of the random streams in which a slice's forward and backward run."""
    return derive_seed("slice", seed, epoch, batch, slice_number)


class Slices(list[Any]):
    """A rank's slices of one global batch, in their order: batches, or None for an empty one.

    Args:
        slices: one for each slice.
        seeds: the seed of each slice's forward and backward.
    """

    def __init__(self, slices: Iterable[Any], seeds: list[int]) -> None:
        super().__init__(slices)
        self.seeds = seeds

    def seeded(self, number: int) -> Any:
        """Return a slice after its random streams have begun."""
        seed_all(self.seeds[number])
        return self[number]
