"""The digest: a few bytes that show, without another collective, that ranks do not need control blocks.

Each rank writes its weight and a digest of its status to its slot in the tail of the last bucket. A rank that needs to
report anything else leaves its slot at zero. After the bucket is reduced, every rank reads the same tail: if all
digests are present and equal, the step is over; otherwise all ranks exchange their control blocks. Each rank decides on
its own, but because all read the same tail, they launch the same collectives.

    [ slot of rank 0 | slot of rank 1 | … ]     a slot: 1, 8 bytes of digest, 8 bytes of weight, one byte per element

Only one rank writes to each slot, so sums are exact in every floating-point type, including bfloat16.

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

# One byte per element, because bfloat16 represents every whole number only up to 256.
_DIGEST = 1 + 8  # elements of a slot that precede the weight
_SLOT = _DIGEST + 8
Notes = Sequence[tuple[float, float]]
"""Weight and weighting of every rank; see :class:`~paceline.ddp.agreement.control_block.Status`."""


def width(size: int) -> int:
    """Return the number of elements in the tail for a group of `size` ranks."""
    return _SLOT * size


class StatusDigest:
    """Writes this rank's digest and weight, and compares the digests of all ranks.

    Args:
        rank: this rank in its group.
        size: number of ranks in the group.
    """

    def __init__(self, rank: int, size: int) -> None:
        self._bytes = bytearray(width(size))
        self._slots = torch.frombuffer(self._bytes, dtype=torch.uint8)  # shares memory, so a step creates no tensor
        self._own = slice(rank * _SLOT, (rank + 1) * _SLOT)
        self._starts = range(0, width(size), _SLOT)
        self._unweighted = [(0.0, UNWEIGHTED)] * size

    def write(self, tail: Tensor, numbers: Sequence[int] | None, weight: float) -> None:
        """Fill the `tail` of a bucket with the weight and a digest of `numbers`, which must be equal on every rank.

        If `numbers` is None, this rank has more to report, and the tail is filled with zeros.
        """
        if numbers is None:
            tail.zero_()
            return
        packed = pack(f"<{len(numbers)}q", *numbers)
        # The leading 1 distinguishes a digest of zeros from an empty slot.
        self._bytes[self._own] = b"\1" + blake2b(packed, digest_size=8).digest() + pack("<d", weight)
        tail.copy_(self._slots)

    def read(self, tail: Tensor, weighting: int) -> Notes | None:
        """Return each rank's weight, paired with `weighting`, if the digests agree; otherwise None."""
        slots = tail.tolist()
        first = slots[:_DIGEST]
        # Zeros mean that a rank has more to report; Inf or NaN means that the sum went wrong.
        if not 0 < first[0] < inf or any(slots[start : start + _DIGEST] != first for start in self._starts):
            return None
        if weighting == UNWEIGHTED:
            return self._unweighted
        weights = [bytes(map(int, slots[start + _DIGEST : start + _SLOT])) for start in self._starts]
        return [(unpack("<d", weight)[0], weighting) for weight in weights]
