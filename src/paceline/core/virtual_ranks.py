"""Virtual ranks: the V slices of a global batch, whose number does not depend on the number of ranks.

Rank r of N computes V/N slices, starting with slice r·V/N, one after the other. See decision 0055.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from paceline.core.option_rules import whole_number
from paceline.core.rng import derive_seed, seed_all
from paceline.errors import UsageError


def check_virtual_ranks(name: str, count: Any) -> int:
    """Return the number of virtual ranks after checking that it is a power of two."""
    number = whole_number(name, count)
    if number & (number - 1):
        raise UsageError(
            f"{name} must be a power of two, not {number}, so that every number of ranks that divides it sums in the "
            "same tree; pass 2, 4, 8, …"
        )
    return number


def virtual_ranks_of(object: Any) -> int:
    """Return the number of virtual ranks of a wrapper; 0 for anything else."""
    count = getattr(object, "virtual_ranks", None)
    return count if isinstance(count, int) else 0


def slices_of_rank(count: int, rank: int, size: int) -> range:
    """Return the numbers of the slices, out of `count`, that `rank` computes."""
    if count % size:
        fitting = " or ".join(str(2**power) for power in range(count.bit_length()))
        raise UsageError(f"{size} ranks do not divide virtual_ranks={count}; start {fitting}")
    share = count // size
    return range(rank * share, (rank + 1) * share)


def seed_of_slice(seed: int, epoch: int, batch: int, slice_number: int) -> int:
    """Return the seed of the random streams for a slice's forward and backward pass."""
    return derive_seed("slice", seed, epoch, batch, slice_number)


class Slices(list[Any]):
    """A rank's slices of one global batch, in order. Each is a batch, or None if it is empty.

    If all slices are empty, `empty` is a batch without samples, or None if there is no such batch.

    Args:
        slices: the batches.
        seeds: a seed for each slice's forward and backward pass.
    """

    empty: Any = None
    example: int | None = None
    """In a request, the index of the sample that becomes the model for an empty batch; None if none is needed."""

    def __init__(self, slices: Iterable[Any], seeds: list[int]) -> None:
        super().__init__(slices)
        self.seeds = seeds

    def seeded(self, number: int) -> Any:
        """Seed the random streams for slice `number`, and return the slice."""
        seed_all(self.seeds[number])
        return self.empty if self[number] is None else self[number]

    @property
    def filled(self) -> list[int]:
        """Return the numbers of the slices that have samples."""
        return [number for number, batch in enumerate(self) if batch is not None]
