"""The digest: a few bytes that show ranks, without a further collective, that they need no control blocks.

Each rank has a slot in the tail of the last bucket, which carries a digest of its status along with the gradients,
and its weight. A rank with anything else to report leaves its slot at zero. When the bucket is reduced, every rank
reads the same tail: if all digests are there and equal, the step is over; otherwise every rank exchanges its control
block. So all ranks launch the same collectives, although each decides by itself.

    [ slot of rank 0 | slot of rank 1 | … ]     a slot: 1, 8 bytes of digest, 8 bytes of weight, one byte an element

A slot is written by one rank alone, so sums are exact in every floating-point type, bfloat16 included.

Decision 0049 says why.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from math import inf
from struct import pack, unpack

import torch
from torch import Tensor

from paceline.ddp.agreement.weight_block import UNWEIGHTED

# A byte an element, as bfloat16 holds all whole numbers only up to 256.
_DIGEST = 1 + 8  # elements of a slot before the weight
_SLOT = _DIGEST + 8
Notes = Sequence[tuple[float, float]]
"""Weight and weighting of every rank; see :class:`~paceline.ddp.agreement.control_block.Status`."""


def width(size: int) -> int:
    """Return the number of elements of a tail, in a group of `size` ranks."""
    return _SLOT * size


class StatusDigest:
    """Writes this rank's digest and weight, and compares the digests of all ranks.

    Args:
        rank: this rank in its group.
        size: the group's ranks.
    """

    def __init__(self, rank: int, size: int) -> None:
        self._bytes = bytearray(width(size))
        self._slots = torch.frombuffer(self._bytes, dtype=torch.uint8)  # shares their memory: no new tensor in a step
        self._own = slice(rank * _SLOT, (rank + 1) * _SLOT)
        self._starts = range(0, width(size), _SLOT)
        self._unweighted = [(0.0, UNWEIGHTED)] * size

    def write(self, tail: Tensor, numbers: Sequence[int] | None, weight: float) -> None:
        """Fill the `tail` of a bucket with a digest of `numbers`, which must be equal on every rank, and the weight.

        Fill it with zeros if `numbers` is None, because this rank has more to report.
        """
        if numbers is None:
            tail.zero_()
            return
        packed = pack(f"<{len(numbers)}q", *numbers)
        # The leading 1 distinguishes a digest of zeros from an empty slot.
        self._bytes[self._own] = b"\1" + blake2b(packed, digest_size=8).digest() + pack("<d", weight)
        tail.copy_(self._slots)

    def read(self, tail: Tensor, weighting: int) -> Notes | None:
        """Return the weights of all ranks, whose `weighting` is the same if digests agree; None if they do not."""
        slots = tail.tolist()
        first = slots[:_DIGEST]
        # A rank with more to report writes zeros; Inf and NaN come from a sum that went wrong.
        if not 0 < first[0] < inf or any(slots[start : start + _DIGEST] != first for start in self._starts):
            return None
        if weighting == UNWEIGHTED:
            return self._unweighted
        weights = [bytes(map(int, slots[start + _DIGEST : start + _SLOT])) for start in self._starts]
        return [(unpack("<d", weight)[0], weighting) for weight in weights]
