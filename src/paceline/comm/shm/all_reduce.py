"""The all-reduce of the ranks of one host.

A small tensor is reduced by every rank for itself. A tensor in the rank's shared memory is reduced where it lies, each
rank reducing its share for all. Any other goes through the stage, chunk by chunk.
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
"""Tensors up to this size are reduced by every rank for itself: fewer bytes are saved than a second signal costs."""


class AllReduce:
    """All-reduces of flat, contiguous tensors of native dtypes."""

    def __init__(self, engine: Engine, stage: Stage) -> None:
        self._engine, self._stage = engine, stage
        self._place, self._size = engine.place, len(engine.members)
        self._small: Tensor | None = None
        """Two places for small tensors, as bytes; allocated when it is first used."""
        self._small_turn = 0
        """The place that the latest small tensor was shown in."""
        self._small_under_way: deque[Operation] = deque()
        """Operations that others may still read the places for: as many as there are places, at most."""

    def run(self, tensor: Tensor, op: ReduceOp.RedOpType) -> None:
        """Reduce `tensor` over all ranks, in place."""
        scale = 1 / self._size if op is ReduceOp.AVG else None
        if 0 < tensor.numel() * tensor.element_size() <= SMALL_BYTES:
            self._run_small(tensor, op, scale)
        elif self._engine.arena.offset_of(tensor) is not None:
            self._run_shared(tensor, op, scale)
        else:
            self._run_staged(tensor, op, scale)

    def post(
        self,
        tensor: Tensor,
        op: ReduceOp.RedOpType,
        scale: float | None,
        note: Note | None,
        factor: Callable[[Sequence[Note]], float] | None,
    ) -> Operation:
        """Begin to reduce `tensor`, which lies in this rank's shared memory; see :meth:`Collectives.post_all_reduce`.

        Raises:
            UsageError: if it lies elsewhere.
        """
        if self._engine.arena.offset_of(tensor) is None:
            raise UsageError("a reduction can be launched of a tensor that the group's allocate() gave, no other")
        header = self._header(tensor, 0, tensor, op, Kind.launched_all_reduce, note or (0.0, 0.0))

        def compute(headers: list[Header]) -> None:
            with recorder.span(REDUCE):
                self._reduce(op, scale if factor is None else factor([header.note for header in headers]), headers)

        return self._engine.post(header, compute)

    def post_parts(
        self,
        tensor: Tensor,
        parts: Sequence[Sequence[slice]],
        op: ReduceOp.RedOpType,
        note: Note,
        factor: Callable[[Sequence[Note]], float] | None,
    ) -> Operation:
        """Begin to reduce this rank's `parts` of `tensor`; see :meth:`Collectives.post_reduce_scatter`."""
        header = self._header(tensor, 0, tensor, op, Kind.launched_reduce_scatter, note)

        def compute(headers: list[Header]) -> None:
            with recorder.span(REDUCE):
                scale = None if factor is None else factor([header.note for header in headers])
                for part in parts[self._place]:
                    operands = self._engine.operands(headers, part)
                    reduce_into([operands[self._place]], operands, op, scale)

        return self._engine.post(header, compute)

    def post_own(self, shown: Tensor, result: Tensor, op: ReduceOp.RedOpType, scale: float | None = None) -> Operation:
        """Begin to reduce what every rank has `shown` in its shared memory, each for itself into `result`."""

        def compute(headers: list[Header]) -> None:
            reduce_into([result], self._engine.operands(headers), op, scale)

        return self._engine.post(self._header(result, 0, shown, op), compute)

    def _run_small(self, tensor: Tensor, op: ReduceOp.RedOpType, scale: float | None) -> None:
        """Reduce a small tensor as soon as everybody has shown theirs, without waiting until everybody has done so.

        What is shown lies in one of two places, which is written to again when everybody is done with it.
        """
        if self._small is None:
            self._small = self._engine.arena.allocate(HALVES * SMALL_BYTES, torch.uint8)
        if len(self._small_under_way) == HALVES:
            self._engine.wait(self._small_under_way.popleft())
        self._small_turn = 1 - self._small_turn
        nbytes = tensor.numel() * tensor.element_size()
        shown = self._small[self._small_turn * SMALL_BYTES :][:nbytes].view(tensor.dtype)
        shown.copy_(tensor)
        operation = self.post_own(shown, tensor, op, scale)
        self._engine.agree(operation)
        self._small_under_way.append(operation)

    def _run_shared(self, tensor: Tensor, op: ReduceOp.RedOpType, scale: float | None) -> None:
        """Reduce a tensor where it lies, all at once; where another rank stages its own, in that rank's chunks."""
        start, total, taken = 0, tensor.numel(), 0

        def compute(headers: list[Header]) -> None:
            nonlocal taken
            taken = min(header.ready for header in headers)
            self._reduce(op, scale, headers)

        while True:
            self._engine.run(self._header(tensor, start, tensor[start:], op), compute)
            start += taken
            if start >= total:
                return

    def _run_staged(self, tensor: Tensor, op: ReduceOp.RedOpType, scale: float | None) -> None:
        """Reduce a tensor that lies elsewhere, in chunks through the stage."""

        def begin(turn: int, start: int, count: int) -> Begun:
            staged, chunk = self._stage.half(tensor.dtype, turn)[:count], tensor[start : start + count]
            self._copy_others(staged, chunk)
            return self._header(tensor, start, staged, op), partial(self._reduce, op, scale, chunk=chunk)

        def end(turn: int, start: int, count: int) -> None:
            self._copy_others(tensor[start : start + count], self._stage.half(tensor.dtype, turn)[:count])

        self._stage.stream(tensor.numel(), self._stage.half(tensor.dtype).numel(), begin, end)

    def _copy_others(self, target: Tensor, source: Tensor) -> None:
        """Copy the shares that other ranks reduce; this rank's own never goes through the stage."""
        ours = share(target.numel(), self._place, self._size)
        for part in (slice(0, ours.start), slice(ours.stop, None)):
            target[part].copy_(source[part])

    def _reduce(
        self, op: ReduceOp.RedOpType, scale: float | None, headers: list[Header], chunk: Tensor | None = None
    ) -> None:
        """Reduce this rank's share for all: read everybody's, write to everybody's.

        Its own is read from and written to `chunk`, if that is given, and else to where its header says.
        """
        count = min(header.ready for header in headers)
        ours = share(count, self._place, self._size)
        if ours.start < ours.stop:
            parts = self._engine.operands(headers, ours)
            if chunk is not None:
                parts[self._place] = chunk[ours]
            results = [parts[self._place], *parts[: self._place], *parts[self._place + 1 :]]
            reduce_into(results, parts, op, scale)

    def _header(
        self,
        tensor: Tensor,
        start: int,
        operand: Tensor,
        op: ReduceOp.RedOpType,
        kind: Kind = Kind.all_reduce,
        note: Note = (0.0, 0.0),
    ) -> Header:
        return Header.of(kind, self._engine.arena, operand, tensor, start, reduce=code_of(op), note=note)
