"""The stage: shared memory for chunks of tensors in private memory.

It has two halves. The next chunk is copied into one half while the ranks work on the chunk in the other.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from paceline.comm.shm.engine import Engine, Operation
from paceline.comm.shm.header import Header, Shown

STAGE_BYTES = 4 * 2**20
"""Size of one half of the stage, chosen by measurement."""
HALVES = 2


class Stage:
    """The stage of one rank in one group."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._memory: Tensor | None = None
        """Both halves, as bytes; allocated when first used."""

    def stream(
        self,
        header: Header,
        fill: Callable[[Tensor, slice], object],
        compute: Callable[[slice, list[Shown]], None],
        end: Callable[[Tensor, slice], object] | None = None,
        rows: int = 1,
    ) -> None:
        """Send the elements of a collective through the stage in chunks. Each chunk is one operation.

        Args:
            header: description of the collective.
            fill: writes this rank's operand for a chunk, `rows` elements per element of the chunk, into the stage.
            compute: computes this rank's part of a chunk from the memory of all ranks.
            end: called when the operation on a chunk is finished, with the memory that `fill` wrote to.
        """
        if self._memory is None:
            self._memory = self._engine.arena.allocate(HALVES * STAGE_BYTES, torch.uint8)
        halves = self._memory.view(header.dtype).view(HALVES, -1)
        total, length = header.total, max(1, halves.shape[1] // rows)
        under_way: deque[tuple[Operation, Tensor, slice]] = deque()

        def finish() -> None:
            operation, staged, chunk = under_way.popleft()
            self._engine.wait(operation)
            if end is not None:
                end(staged, chunk)

        # Even an empty tensor needs an operation, because other ranks may have passed a tensor of a different size.
        for turn, start in enumerate(range(0, max(1, total), length)):
            if len(under_way) == HALVES:
                finish()
            chunk = slice(start, min(start + length, total))
            staged = halves[turn % HALVES, : (chunk.stop - start) * rows]
            fill(staged, chunk)
            if turn == 1:  # after a mismatch, all ranks stop before the second operation
                self._engine.agree(under_way[0][0])
            shown = self._engine.shown(staged)
            operation = self._engine.post(header._replace(start=start), shown, partial(compute, chunk))
            under_way.append((operation, staged, chunk))
        while under_way:
            finish()
