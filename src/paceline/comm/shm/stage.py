"""The stage: shared memory for chunks of tensors in private memory.

It has two halves. The next chunk is copied into one half while the ranks work on the chunk in the other.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import torch
from torch import Tensor

from paceline.comm.shm.engine import Compute, Engine, Operation
from paceline.comm.shm.header import Header, Shown

STAGE_BYTES = 4 * 2**20
"""Size of one half of the stage, chosen by measurement."""
HALVES = 2
Begun = tuple[Header, Shown, Compute]
"""An operation to post: its header, this rank's operand, and the function that computes it."""


class Stage:
    """The stage of one rank in one group."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._memory: Tensor | None = None
        """Both halves, as bytes; allocated when first used."""

    def half(self, dtype: torch.dtype, turn: int = 0) -> Tensor:
        """Return the half for chunk number `turn`, as elements of `dtype`."""
        if self._memory is None:
            self._memory = self._engine.arena.allocate(HALVES * STAGE_BYTES, torch.uint8)
        start = turn % HALVES * STAGE_BYTES
        return self._memory[start : start + STAGE_BYTES].view(dtype)

    def stream(
        self,
        total: int,
        length: int,
        begin: Callable[[int, int, int], Begun],
        end: Callable[[int, int, int], None] | None = None,
    ) -> None:
        """Send `total` elements through the stage in chunks of `length`. Each chunk is one operation.

        ``begin(turn, start, count)`` fills a half of the stage and describes the operation. ``end`` is called with the
        same arguments when the operation is finished.
        """
        under_way: deque[tuple[Operation, tuple[int, int, int]]] = deque()

        def finish() -> None:
            operation, chunk = under_way.popleft()
            self._engine.wait(operation)
            if end is not None:
                end(*chunk)

        # Even an empty tensor needs an operation, because other ranks may have passed a tensor of a different size.
        for turn, start in enumerate(range(0, max(1, total), length)):
            if len(under_way) == HALVES:
                finish()
            chunk = (turn, start, min(length, total - start))
            begun = begin(*chunk)
            if turn == 1:  # after a mismatch, all ranks stop before the second operation
                self._engine.agree(under_way[0][0])
            under_way.append((self._engine.post(*begun), chunk))
        while under_way:
            finish()
