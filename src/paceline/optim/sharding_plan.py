"""The sharding plan: the pieces of parameters and their owners, computed from values that are equal on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

ALIGN = 128
"""Parameters are cut at multiples of this number of elements. If the last elements of a tensor do not fill a vector
register, CPU kernels use different instructions for them, which may round differently."""


@dataclass(frozen=True)
class Piece:
    """Elements `start` to `stop` of a flattened parameter, and the rank that owns them."""

    parameter: int
    start: int
    stop: int
    owner: int

    @property
    def numel(self) -> int:
        return self.stop - self.start


def cut_evenly(sizes: Sequence[int], members: Sequence[int], ranks: int, align: int = ALIGN) -> list[Piece]:
    """Cut a bucket into one contiguous shard for each rank, all of about the same size.

    Args:
        sizes: number of elements of every parameter.
        members: indices of the bucket's parameters, in order.
        ranks: number of ranks.
        align: parameters are cut at multiples of this number of elements, or at their end.

    Returns:
        The pieces, in bucket order, without empty ones.
    """
    total = sum(sizes[index] for index in members)
    pieces, offset, owner = [], 0, 0
    for index in members:
        start, size = 0, sizes[index]
        while start < size:
            end = size
            # Find the first rank whose shard extends beyond `start`. Rounding may leave a rank's shard empty.
            while owner < ranks - 1:
                cut = _rounded(total * (owner + 1) // ranks - offset, size, align)
                if cut > start:
                    end = cut
                    break
                owner += 1
            pieces.append(Piece(index, start, end, owner))
            start = end
        offset += size
    return pieces


def _rounded(cut: int, size: int, align: int) -> int:
    """Return the aligned position nearest to `cut` in a parameter of `size` elements."""
    if cut >= size:
        return size
    return min(size, (cut + align // 2) // align * align)


def deal_out(sizes: Sequence[int], members: Sequence[int], ranks: int, loads: list[int]) -> list[Piece]:
    """Assign whole parameters, the largest first, each to the rank with the fewest elements.

    `loads` has the number of elements of each rank, and is updated in place.
    """
    pieces = []
    for index in sorted(members, key=lambda index: -sizes[index]):
        owner = min(range(ranks), key=loads.__getitem__)
        loads[owner] += sizes[index]
        pieces.append(Piece(index, 0, sizes[index], owner))
    return sorted(pieces, key=lambda piece: members.index(piece.parameter))
