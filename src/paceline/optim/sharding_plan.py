"""The sharding plan: the slices of parameters and their owners, from plain values that are equal on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

ALIGN = 128
"""Number of elements at whose multiples parameters are cut. On a CPU a kernel computes the last elements of a tensor,
which do not fill a vector register, by other instructions than the rest, and may round them differently."""


@dataclass(frozen=True)
class Piece:
    """The elements from `start` to `stop` of the flat parameter number `parameter`, and the rank that owns them."""

    parameter: int
    start: int
    stop: int
    owner: int

    @property
    def numel(self) -> int:
        """Number of its elements."""
        return self.stop - self.start


def cut_evenly(sizes: Sequence[int], members: Sequence[int], ranks: int, align: int = ALIGN) -> list[Piece]:
    """Cut a bucket into one contiguous shard for each rank, all of about the same size.

    Args:
        sizes: number of elements of every parameter, by its index.
        members: indices of the parameters that lie in the bucket, one after the other.
        ranks: number of ranks.
        align: cuts lie at multiples of so many elements of a parameter, or at its end.

    Returns:
        The pieces in the order of the bucket, in which their owners ascend. Empty pieces are left out.
    """
    total = sum(sizes[index] for index in members)
    pieces, offset, owner = [], 0, 0
    for index in members:
        start, size = 0, sizes[index]
        while start < size:
            end = size
            # Find the first rank whose shard reaches beyond `start`; after rounding, others may get nothing.
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
    """Return where to cut a parameter of `size` elements near `cut`; `size` for a cut that is behind it."""
    if cut >= size:
        return size
    return min(size, (cut + align // 2) // align * align)


def deal_out(sizes: Sequence[int], members: Sequence[int], ranks: int, loads: list[int]) -> list[Piece]:
    """Give every rank whole parameters: the largest first, each to the rank with the least so far.

    Args:
        sizes: number of elements of every parameter, by its index.
        members: indices of the parameters to deal out.
        ranks: number of ranks.
        loads: number of elements that every rank has already; new ones are added.
    """
    pieces = []
    # The largest first, so that the small ones even the loads out.
    for index in sorted(members, key=lambda index: -sizes[index]):
        owner = min(range(ranks), key=loads.__getitem__)
        loads[owner] += sizes[index]
        pieces.append(Piece(index, 0, sizes[index], owner))
    return sorted(pieces, key=lambda piece: members.index(piece.parameter))
