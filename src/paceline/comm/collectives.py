"""Collectives of the ranks of one host, over the engine.

A tensor in the rank's shared memory is reduced where it lies. Any other goes through a stage in shared memory, chunk by
chunk; while the others work on one half of the stage, the next chunk is copied into the other half.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from paceline.comm.arithmetic import code_of, reduce_into, share
from paceline.comm.engine import Engine, Header, Kind, Operation

STAGE_BYTES = 2 * 2**20
"""Bytes of one half of the stage; measured in ``benchmarks/collectives.py``."""
HALVES = 2
Note = tuple[float, float]
"""Two numbers that travel with an operation."""


class Collectives:
    """What ranks of one host do together. Operands are flat and contiguous, of native dtypes."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.place = engine.members.index(engine.rank)
        self.size = len(engine.members)
        self._stage: Tensor | None = None

    # -- all-reduce ---------------------------------------------------------------------------------------------

    def all_reduce(self, tensor: Tensor, op: ReduceOp.RedOpType) -> None:
        """Reduce `tensor` over all ranks, in place."""
        scale = 1 / self.size if op is ReduceOp.AVG else None
        if self._engine.arena.offset_of(tensor) is not None:
            self._engine.wait(self.post_all_reduce(tensor, op, scale))
            return

        def copy_out(chunk: Tensor, staged: Tensor) -> None:
            chunk.copy_(staged)

        header = Header(Kind.all_reduce, tensor.dtype, reduce=code_of(op))
        self._staged(header, tensor, partial(self._reduce, op, scale), copy_out=copy_out)

    def post_all_reduce(
        self,
        tensor: Tensor,
        op: ReduceOp.RedOpType,
        scale: float | None = None,
        note: Note | None = None,
        factor: Callable[[Sequence[Note]], float] | None = None,
    ) -> Operation:
        """Begin to reduce `tensor`, which lies in this rank's shared memory.

        The result is multiplied by `scale`, or by ``factor`` of all ranks' notes, while it is summed.
        """
        offset = self._engine.arena.offset_of(tensor)
        assert offset is not None, "only what lies in shared memory can be posted"
        header = Header(Kind.all_reduce, tensor.dtype, tensor.numel(), code_of(op), 0, offset, note or (0.0, 0.0))

        def compute(headers: list[Header]) -> None:
            self._reduce(op, scale if factor is None else factor([one.note for one in headers]), headers)

        return self._engine.post(header, compute)

    def _reduce(self, op: ReduceOp.RedOpType, scale: float | None, headers: list[Header]) -> None:
        """This rank's share of an all-reduce: read everybody's, write to everybody's."""
        mine = share(headers[0].count, self.place, self.size)
        parts = [part[mine] for part in self._operands(headers)]
        reduce_into(parts, parts, op, scale)

    # -- the others ---------------------------------------------------------------------------------------------

    def broadcast(self, tensor: Tensor, root: int) -> None:
        """Make `tensor` equal to that of the rank in place `root`."""

        def take(chunk: Tensor, headers: list[Header]) -> None:
            if self.place != root:
                chunk.copy_(self._operands(headers)[root])

        header = Header(Kind.broadcast, tensor.dtype, root=root)
        self._staged(header, tensor, take=take, copy_in=self.place == root)

    def all_gather(self, outputs: Sequence[Tensor], tensor: Tensor) -> None:
        """Every rank's `tensor`, into `outputs` in the order of ranks."""

        def take(start: int, headers: list[Header]) -> None:
            for output, part in zip(outputs, self._operands(headers), strict=True):
                output[start : start + part.numel()].copy_(part)

        self._staged(Header(Kind.all_gather, tensor.dtype), tensor, at=take)

    def reduce_scatter(self, output: Tensor, inputs: Sequence[Tensor], op: ReduceOp.RedOpType) -> None:
        """The reduction over all ranks of their input number `place`, into `output`."""
        scale = 1 / self.size if op is ReduceOp.AVG else None
        length = max(1, self._half(output.dtype).numel() // self.size)
        under_way: deque[Operation] = deque()
        for turn, start in enumerate(range(0, max(1, output.numel()), length)):
            count = min(length, output.numel() - start)
            staged = self._half(output.dtype, turn)[: count * self.size].view(self.size, count)
            if len(under_way) == HALVES:
                self._engine.wait(under_way.popleft())
            for row, given in zip(staged, inputs, strict=True):
                row.copy_(given[start : start + count])

            def compute(headers: list[Header], start: int = start, count: int = count) -> None:
                rows = [part.view(self.size, count)[self.place] for part in self._operands(headers)]
                reduce_into([output[start : start + count]], rows, op, scale)

            header = Header(
                Kind.reduce_scatter, output.dtype, count * self.size, code_of(op), offset=self._offset(staged)
            )
            under_way.append(self._engine.post(header, compute))
        for operation in under_way:
            self._engine.wait(operation)

    def barrier(self) -> None:
        """Wait until every rank has come here."""
        self._engine.run(Header(Kind.barrier), lambda _: None)

    # -- chunks through the stage -------------------------------------------------------------------------------

    def _staged(
        self,
        header: Header,
        tensor: Tensor,
        compute: Callable[[list[Header]], None] | None = None,
        *,
        take: Callable[[Tensor, list[Header]], None] | None = None,
        at: Callable[[int, list[Header]], None] | None = None,
        copy_in: bool = True,
        copy_out: Callable[[Tensor, Tensor], None] | None = None,
    ) -> None:
        """Send `tensor` through the stage, chunk by chunk.

        Each chunk is one operation, whose work is ``compute(headers)``, ``take(chunk, headers)`` or
        ``at(start, headers)``; ``copy_out(chunk, staged)`` follows when it is finished.
        """
        under_way: deque[tuple[Operation, Tensor, Tensor]] = deque()

        def finish() -> None:
            operation, chunk, staged = under_way.popleft()
            self._engine.wait(operation)
            if copy_out is not None:
                copy_out(chunk, staged)

        length = self._half(tensor.dtype).numel()
        for turn, start in enumerate(range(0, max(1, tensor.numel()), length)):
            if len(under_way) == HALVES:
                finish()
            chunk = tensor[start : start + length]
            staged = self._half(tensor.dtype, turn)[: chunk.numel()]
            if copy_in:
                staged.copy_(chunk)
            work = compute or (partial(take, chunk) if take else partial(at, start) if at else None)
            assert work is not None
            described = Header(
                header.kind, header.dtype, chunk.numel(), header.reduce, header.root, self._offset(staged)
            )
            under_way.append((self._engine.post(described, work), chunk, staged))
        while under_way:
            finish()

    def _operands(self, headers: Sequence[Header]) -> list[Tensor]:
        pairs = zip(self._engine.memories, headers, strict=True)
        return [memory.tensor(header.offset, header.count, header.dtype) for memory, header in pairs]

    def _offset(self, staged: Tensor) -> int:
        return staged.data_ptr() - self._engine.arena.address

    def _half(self, dtype: torch.dtype, turn: int = 0) -> Tensor:
        """One half of the stage, as elements of `dtype`."""
        if self._stage is None:
            self._stage = self._engine.arena.allocate(HALVES * STAGE_BYTES, torch.uint8)
        start = turn % HALVES * STAGE_BYTES
        return self._stage[start : start + STAGE_BYTES].view(dtype)
