"""The digest: a few bytes by which ranks see, without a collective of its own, that nothing has to be said.

Each rank has a slot in the tail of the last bucket, which carries a digest of its status along with the gradients. A
rank with anything to report leaves its slot at zero. When the bucket is reduced, every rank reads the same tail: if all
digests are there and equal, the step is over; otherwise every rank exchanges its control block. So no rank has to know
what the others found in order to launch the same collectives as they do.

    [ digest of rank 0 | digest of rank 1 | … ]     one byte an element, counted from 1; a slot of zeros: exchange

A slot is written by one rank alone, so sums are exact in every floating-point type, bfloat16 included, and where means
are formed all slots have the same factor.

Decision 0049 says why.
"""

from __future__ import annotations

from array import array
from hashlib import blake2b

import torch
from torch import Tensor

from paceline.ddp.agreement.control_block import Status

WIDTH = 8
"""Elements, and bytes of a digest, for each rank."""


class StatusDigest:
    """Writes this rank's digest, and compares those of all ranks.

    Args:
        rank: this rank in its group.
        size: the group's ranks.
    """

    def __init__(self, rank: int, size: int) -> None:
        self._numbers = array("f", bytes(4 * WIDTH * size))
        self._slots = torch.frombuffer(self._numbers, dtype=torch.float32)  # shows the numbers: no tensor in a step
        self._own = slice(rank * WIDTH, (rank + 1) * WIDTH)
        self._others = range(WIDTH, WIDTH * size, WIDTH)

    def write(self, tail: Tensor, status: Status | None) -> None:
        """Fill the `tail` of a bucket with this rank's digest; of None, which is something to report, with zeros."""
        if status is None:
            tail.zero_()
            return
        digest = blake2b(array("d", status.row), digest_size=WIDTH).digest()
        self._numbers[self._own] = array("f", [byte + 1 for byte in digest])
        tail.copy_(self._slots)

    def all_agree(self, tail: Tensor) -> bool:
        """Whether every rank has written the same digest into its slot of the reduced `tail`."""
        slots = tail.tolist()
        first = slots[:WIDTH]
        return first[0] != 0 and all(slots[start : start + WIDTH] == first for start in self._others)
