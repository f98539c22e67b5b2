"""Collectives of the ranks of one host, over the engine. Tensors go through the stage, chunk by chunk."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor
from torch.distributed import ReduceOp

from paceline.comm.arithmetic import code_of, reduce_into
from paceline.comm.shm.all_reduce import AllReduce
from paceline.comm.shm.engine import Engine
from paceline.comm.shm.header import Header, Kind, Note
from paceline.comm.shm.operation import Operation
from paceline.comm.shm.stage import Begun, Stage


class Collectives:
    """The collectives of one group on one host. Tensors are flat and contiguous, of native dtypes."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.place = engine.place
        """This rank's place among the ranks of the host, which all collectives count by."""
        self.size = len(engine.members)
        self._stage = Stage(engine)
        self._reductions = AllReduce(engine, self._stage)

    def all_reduce(self, tensor: Tensor, op: ReduceOp.RedOpType) -> None:
        """Reduce `tensor` over all ranks, in place."""
        self._reductions.run(tensor, op)

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

        Raises:
            UsageError: if it lies elsewhere.
        """
        return self._reductions.post(tensor, op, scale, note, factor)

    def post_reduce_scatter(
        self,
        tensor: Tensor,
        parts: Sequence[Sequence[slice]],
        note: Note | None = None,
        factor: Callable[[Sequence[Note]], float] | None = None,
    ) -> Operation:
        """Begin to sum `tensor`, which lies in this rank's shared memory, in the elements that are this rank's alone.

        Args:
            tensor: elsewhere it keeps its values; not to be written to until the operation is finished.
            parts: which elements are of the rank in each place; no element is of two.
            note: of this rank.
            factor: of all ranks' notes, by which the sum is multiplied.
        """
        return self._reductions.post_parts(tensor, parts, ReduceOp.SUM, note or (0.0, 0.0), factor)

    def post_own_sum(self, shown: Tensor, result: Tensor) -> Operation:
        """Begin to sum what all ranks show in their shared memory, each for itself into its `result`."""
        return self._reductions.post_own(shown, result, ReduceOp.SUM)

    def post_gather(self, tensor: Tensor, parts: Sequence[Sequence[slice]]) -> Operation:
        """Begin to copy the others' parts into `tensor`, which lies in this rank's shared memory.

        Args:
            tensor: not to be written to until the operation is finished.
            parts: which elements come from the rank in each place; the same on every rank.
        """

        def compute(headers: list[Header]) -> None:
            for place, operand in enumerate(self._engine.operands(headers)):
                if place != self.place:
                    for part in parts[place]:
                        tensor[part].copy_(operand[part])

        return self._engine.post(self._header(Kind.launched_gather, tensor, tensor, 0), compute)

    def broadcast(self, tensor: Tensor, root: int) -> None:
        """Make `tensor` equal to that of the rank in place `root`."""

        def begin(turn: int, start: int, count: int) -> Begun:
            chunk, staged = tensor[start : start + count], self._stage.half(tensor.dtype, turn)[:count]
            if self.place == root:
                staged.copy_(chunk)

            def take(headers: list[Header]) -> None:
                if self.place != root:
                    chunk.copy_(self._engine.operands(headers)[root])

            return self._header(Kind.broadcast, staged, tensor, start, root=root), take

        self._stage.stream(tensor.numel(), self._stage.half(tensor.dtype).numel(), begin)

    def all_gather(self, outputs: Sequence[Tensor], tensor: Tensor) -> None:
        """Copy every rank's `tensor` into `outputs`, in the order of ranks."""

        def begin(turn: int, start: int, count: int) -> Begun:
            staged = self._stage.half(tensor.dtype, turn)[:count]
            staged.copy_(tensor[start : start + count])

            def take(headers: list[Header]) -> None:
                for output, part in zip(outputs, self._engine.operands(headers), strict=True):
                    output[start : start + count].copy_(part)

            return self._header(Kind.all_gather, staged, tensor, start), take

        self._stage.stream(tensor.numel(), self._stage.half(tensor.dtype).numel(), begin)

    def reduce_scatter(self, output: Tensor, inputs: Sequence[Tensor], op: ReduceOp.RedOpType) -> None:
        """Reduce over all ranks their input number `place`, into `output`."""
        scale = 1 / self.size if op is ReduceOp.AVG else None

        def begin(turn: int, start: int, count: int) -> Begun:
            staged = self._stage.half(output.dtype, turn)[: count * self.size]
            for row, input_tensor in zip(staged.view(self.size, count), inputs, strict=True):
                row.copy_(input_tensor[start : start + count])

            def compute(headers: list[Header]) -> None:
                rows = [part[self.place * count : (self.place + 1) * count] for part in self._engine.operands(headers)]
                reduce_into([output[start : start + count]], rows, op, scale)

            return self._header(Kind.reduce_scatter, staged, output, start, code_of(op)), compute

        self._stage.stream(output.numel(), max(1, self._stage.half(output.dtype).numel() // self.size), begin)

    def barrier(self) -> None:
        """Wait until every rank has come here."""
        self._engine.run(Header(Kind.barrier), lambda _: None)

    def _header(
        self, kind: Kind, operand: Tensor, tensor: Tensor, start: int, reduce: int = 0, root: int = 0
    ) -> Header:
        return Header.of(kind, self._engine.arena, operand, tensor, start, reduce=reduce, root=root)
