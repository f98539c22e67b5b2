"""The digest: a few bytes by which ranks see, without a collective of its own, that nothing has to be said.

Each rank has a slot in the tail of the last bucket, which carries a digest of its status along with the gradients. A
rank with anything to report leaves its slot at zero. When the bucket is reduced, every rank reads the same tail: if all
digests are there and equal, the step is over; otherwise every rank exchanges its control block. So no rank has to know
what the others found in order to launch the same collectives as they do.

    [ slot of rank 0 | slot of rank 1 | … ]     a slot: 1, then the bytes of the digest, one an element; or zeros

A slot is written by one rank alone, so sums are exact in every floating-point type, bfloat16 included, and where means
are formed all slots have the same factor.

Decision 0049 says why.
"""

from __future__ import annotations

from hashlib import blake2b
from math import inf
from struct import pack

import torch
from torch import Tensor

_BYTES = 8
WIDTH = 1 + _BYTES
"""Elements of a slot."""
Position = tuple[int, ...]
"""Numbers that must be equal on every rank; see :meth:`~paceline.ddp.agreement.ledger.Ledger.position`."""


class StatusDigest:
    """Writes this rank's digest, and compares those of all ranks.

    Args:
        rank: this rank in its group.
        size: the group's ranks.
    """

    def __init__(self, rank: int, size: int) -> None:
        self._bytes = bytearray(WIDTH * size)
        self._slots = torch.frombuffer(self._bytes, dtype=torch.uint8)  # shows the bytes: no new tensor in a step
        self._own = slice(rank * WIDTH, (rank + 1) * WIDTH)
        self._others = range(WIDTH, WIDTH * size, WIDTH)

    def write(self, tail: Tensor, position: Position | None) -> None:
        """Fill the `tail` of a bucket with the digest of this rank's `position`; zeros if it has more to report."""
        if position is None:
            tail.zero_()
            return
        packed = pack(f"<{len(position)}q", *position)
        self._bytes[self._own] = b"\1" + blake2b(packed, digest_size=_BYTES).digest()
        tail.copy_(self._slots)

    def all_agree(self, tail: Tensor) -> bool:
        """Whether every rank has written the same digest into its slot of the reduced `tail`."""
        slots = tail.tolist()
        first = slots[:WIDTH]
        return 0 < first[0] < inf and all(slots[start : start + WIDTH] == first for start in self._others)
