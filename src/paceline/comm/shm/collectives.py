"""Collectives of the ranks of one host, over the engine.

An all-reduce takes one of three ways. Every rank reduces a small tensor by itself. A tensor in the rank's shared memory
is reduced where it lies, each rank reducing its share for all. Any other goes through the stage, chunk by chunk, and so
do the tensors of the other collectives.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from paceline.comm.arithmetic import code_of, reduce_into, share
from paceline.comm.shm.engine import Engine
from paceline.comm.shm.header import Header, Kind, Note
from paceline.comm.shm.operation import Operation
from paceline.comm.shm.stage import HALVES, Begun, Stage
from paceline.core.telemetry.spans import REDUCE, recorder
from paceline.errors import UsageError

SMALL_BYTES = 4096
"""Size up to which every rank reduces a tensor by itself: sharing the work saves less than a second signal costs."""
Factor = Callable[[Sequence[Note]], float]
"""Computes the factor of a sum from the notes of all ranks."""


class Collectives:
    """The collectives of one group on one host. Tensors are flat and contiguous, of native dtypes."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.place = engine.place
        """Index of this rank among the ranks of the host, in the order that all collectives use."""
        self.size = len(engine.members)
        self._stage = Stage(engine)
        self._small: Tensor | None = None
        """Two places for small tensors, as bytes; allocated when first used."""
        self._small_turn = 0
        """Index of the place that holds the latest small tensor."""
        self._small_under_way: deque[Operation] = deque()
        """Operations for which other ranks may still read the places; at most one for each place."""

    # -- launched: no thread works on them ----------------------------------------------------------------------

    def post_all_reduce(self, tensor: Tensor, note: Note | None, factor: Factor | None) -> Operation:
        """Begin to sum `tensor`, which lies in this rank's shared memory, on all ranks.

        The sum is multiplied by ``factor`` of all ranks' notes, to which this rank adds `note`.

        Raises:
            UsageError: if the tensor lies elsewhere.
        """
        if self._engine.arena.offset_of(tensor) is None:
            raise UsageError("a reduction can be launched only of a tensor that the group's allocate() returned")

        def compute(headers: list[Header]) -> None:
            with recorder.span(REDUCE):
                self._reduce(ReduceOp.SUM, _scale(factor, headers), headers)

        header = self._header(Kind.launched_all_reduce, tensor, tensor, note=note, op=ReduceOp.SUM)
        return self._engine.post(header, compute)

    def post_reduce_scatter(
        self, tensor: Tensor, parts: Sequence[Sequence[slice]], note: Note | None, factor: Factor | None
    ) -> Operation:
        """Begin to sum `tensor`, which lies in this rank's shared memory, in the elements that this rank alone gets.

        Args:
            tensor: elsewhere it keeps its values; do not write to it until the operation is finished.
            parts: the elements for the rank in each place; no two ranks share an element.
            note: this rank's note.
            factor: computes the factor of the sum from all ranks' notes.
        """

        def compute(headers: list[Header]) -> None:
            with recorder.span(REDUCE):
                scale = _scale(factor, headers)
                for part in parts[self.place]:
                    operands = self._engine.operands(headers, part)
                    reduce_into([operands[self.place]], operands, ReduceOp.SUM, scale)

        header = self._header(Kind.launched_reduce_scatter, tensor, tensor, note=note, op=ReduceOp.SUM)
        return self._engine.post(header, compute)

    def post_own_sum(self, shown: Tensor, result: Tensor) -> Operation:
        """Begin to sum the tensors that all ranks show in their shared memory; each rank computes its own `result`."""
        return self._post_own(shown, result, ReduceOp.SUM)

    def post_gather(self, tensor: Tensor, parts: Sequence[Sequence[slice]]) -> Operation:
        """Begin to copy the other ranks' parts into `tensor`, which lies in this rank's shared memory.

        Args:
            tensor: do not write to it until the operation is finished.
            parts: the elements that come from the rank in each place; the same on every rank.
        """

        def compute(headers: list[Header]) -> None:
            for place, operand in enumerate(self._engine.operands(headers)):
                if place != self.place:
                    for part in parts[place]:
                        tensor[part].copy_(operand[part])

        return self._engine.post(self._header(Kind.launched_gather, tensor, tensor), compute)

    # -- waited for ---------------------------------------------------------------------------------------------

    def all_reduce(self, tensor: Tensor, op: ReduceOp.RedOpType) -> None:
        """Reduce `tensor` over all ranks, in place."""
        scale = 1 / self.size if op is ReduceOp.AVG else None
        if 0 < tensor.numel() * tensor.element_size() <= SMALL_BYTES:
            self._reduce_small(tensor, op, scale)
        elif self._engine.arena.offset_of(tensor) is not None:
            self._reduce_shared(tensor, op, scale)
        else:
            self._reduce_staged(tensor, op, scale)

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

            return self._header(Kind.reduce_scatter, staged, output, start, op=op), compute

        self._stage.stream(output.numel(), max(1, self._stage.half(output.dtype).numel() // self.size), begin)

    def barrier(self) -> None:
        """Wait until every rank has reached this point."""
        self._engine.run(Header(Kind.barrier), lambda _: None)

    # -- the three ways of an all-reduce ------------------------------------------------------------------------

    def _reduce_small(self, tensor: Tensor, op: ReduceOp.RedOpType, scale: float | None) -> None:
        """Reduce a small tensor as soon as every rank shows its own, without waiting until every rank has reduced.

        A tensor is shown in one of two places, which is written to again when every rank is done with it.
        """
        if self._small is None:
            self._small = self._engine.arena.allocate(HALVES * SMALL_BYTES, torch.uint8)
        if len(self._small_under_way) == HALVES:
            self._engine.wait(self._small_under_way.popleft())
        self._small_turn = 1 - self._small_turn
        nbytes = tensor.numel() * tensor.element_size()
        shown = self._small[self._small_turn * SMALL_BYTES :][:nbytes].view(tensor.dtype)
        shown.copy_(tensor)
        operation = self._post_own(shown, tensor, op, scale)
        self._engine.agree(operation)
        self._small_under_way.append(operation)

    def _reduce_shared(self, tensor: Tensor, op: ReduceOp.RedOpType, scale: float | None) -> None:
        """Reduce a tensor where it lies, all at once; where another rank stages its own, in that rank's chunks."""
        start, total, taken = 0, tensor.numel(), 0

        def compute(headers: list[Header]) -> None:
            nonlocal taken
            taken = min(header.ready for header in headers)
            self._reduce(op, scale, headers)

        while True:
            self._engine.run(self._header(Kind.all_reduce, tensor[start:], tensor, start, op=op), compute)
            start += taken
            if start >= total:
                return

    def _reduce_staged(self, tensor: Tensor, op: ReduceOp.RedOpType, scale: float | None) -> None:
        """Reduce a tensor that lies elsewhere, in chunks through the stage."""

        def begin(turn: int, start: int, count: int) -> Begun:
            staged, chunk = self._stage.half(tensor.dtype, turn)[:count], tensor[start : start + count]
            self._copy_others(staged, chunk)
            header = self._header(Kind.all_reduce, staged, tensor, start, op=op)
            return header, partial(self._reduce, op, scale, chunk=chunk)

        def end(turn: int, start: int, count: int) -> None:
            self._copy_others(tensor[start : start + count], self._stage.half(tensor.dtype, turn)[:count])

        self._stage.stream(tensor.numel(), self._stage.half(tensor.dtype).numel(), begin, end)

    def _post_own(self, shown: Tensor, result: Tensor, op: ReduceOp.RedOpType, scale: float | None = None) -> Operation:
        def compute(headers: list[Header]) -> None:
            reduce_into([result], self._engine.operands(headers), op, scale)

        return self._engine.post(self._header(Kind.all_reduce, shown, result, op=op), compute)

    def _copy_others(self, target: Tensor, source: Tensor) -> None:
        """Copy the shares that other ranks reduce; this rank's own never goes through the stage."""
        ours = share(target.numel(), self.place, self.size)
        for part in (slice(0, ours.start), slice(ours.stop, None)):
            target[part].copy_(source[part])

    def _reduce(
        self, op: ReduceOp.RedOpType, scale: float | None, headers: list[Header], chunk: Tensor | None = None
    ) -> None:
        """Reduce this rank's share for all ranks: read it from every rank's memory, and write it to every rank's.

        This rank's own is read from `chunk` and written there, if that is given, instead of the place in its header.
        """
        count = min(header.ready for header in headers)
        ours = share(count, self.place, self.size)
        if ours.start < ours.stop:
            parts = self._engine.operands(headers, ours)
            if chunk is not None:
                parts[self.place] = chunk[ours]
            results = [parts[self.place], *parts[: self.place], *parts[self.place + 1 :]]
            reduce_into(results, parts, op, scale)

    def _header(
        self,
        kind: Kind,
        operand: Tensor,
        tensor: Tensor,
        start: int = 0,
        *,
        op: ReduceOp.RedOpType | None = None,
        root: int = 0,
        note: Note | None = None,
    ) -> Header:
        reduce = 0 if op is None else code_of(op)
        arena = self._engine.arena
        return Header.of(kind, arena, operand, tensor, start, reduce=reduce, root=root, note=note or (0.0, 0.0))


def _scale(factor: Factor | None, headers: Sequence[Header]) -> float | None:
    return None if factor is None else factor([header.note for header in headers])
