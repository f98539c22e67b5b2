"""Collectives of the ranks of one host, over the engine.

An all-reduce uses one of three methods. For a small tensor, each rank computes the whole reduction itself, from copies
that all ranks show. A tensor in shared memory is reduced in place; each rank reduces its share for all ranks. Any other
tensor goes through the stage, chunk by chunk, like the tensors of the other collectives.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from paceline.comm.arithmetic import code_of, reduce_into, share
from paceline.comm.operation_header import Header, Kind, Shown
from paceline.comm.shm_arena import Arena
from paceline.comm.shm_engine import Engine, Operation
from paceline.core.spans import REDUCE, recorder
from paceline.core.torch_internals import copy_each
from paceline.errors import UsageError

STAGE_BYTES = 4 * 2**20
"""Size of one half of the stage, chosen by measurement."""
HALVES = 2
SMALL_BYTES = 32 * 1024
"""Largest tensor that each rank reduces by itself, because dividing the work would save less than a signal costs.

A place has this size, or a multiple of it for a larger tensor.
"""
NOT_RECORDED = nullcontext()


class Collectives:
    """The collectives of one group on one host. Tensors are flat and contiguous, and have native dtypes."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.rank, self.size = engine.rank, len(engine.names)
        self._stage = Stage(engine)
        self._places = Places(engine.arena)

    # -- launched: no thread works on them ----------------------------------------------------------------------

    def post_all_reduce(self, tensor: Tensor) -> Operation:
        """Begin to sum `tensor`, which lies in this rank's shared memory, on all ranks."""
        offset = self.engine.arena.offset_of(tensor)
        if offset is None:
            raise UsageError("the tensor to reduce is not in shared memory; create it with the group's allocate()")
        if tensor.nbytes <= SMALL_BYTES:
            return self.post_own_sum(tensor)

        def compute(shown: list[Shown]) -> None:
            with recorder.span(REDUCE):
                self._reduce(tensor.dtype, ReduceOp.SUM, None, shown)

        header = Header(Kind.launched_all_reduce, tensor.dtype, tensor.numel(), 0, code_of(ReduceOp.SUM))
        return self.engine.post(header, Shown(tensor.numel(), offset), compute)

    def post_own_sum(self, tensor: Tensor) -> Operation:
        """Begin to sum `tensor`, in any memory, from a copy of its current values; each rank computes its own sum.

        The sum is complete once every rank has launched it, without waiting for other ranks' results.
        """
        return self._post_own(Kind.own_sum, tensor, ReduceOp.SUM)

    def post_gather(self, tensor: Tensor, places: Sequence[Sequence[tuple[Tensor, slice]]]) -> Operation:
        """Begin to copy elements of the other ranks' `tensor`, in shared memory, into tensors of this rank.

        Args:
            tensor: do not write to it until the operation is finished.
            places: for the rank in each place, the tensors to copy into, each with the slice of that rank's `tensor`.
        """

        @torch.no_grad()
        def compute(shown: list[Shown]) -> None:
            for place, operand in enumerate(self.engine.operands(shown, tensor.dtype)):
                if place != self.rank and places[place]:
                    targets = [target for target, _ in places[place]]
                    copy_each(targets, [operand[part] for _, part in places[place]])

        return self.engine.post(_header(Kind.launched_gather, tensor), self.engine.shown(tensor), compute)

    def post_small(self, tensor: Tensor, op: ReduceOp.RedOpType) -> Operation | None:
        """Begin :meth:`all_reduce` of at most ``SMALL_BYTES``; return None if that would require waiting."""
        return self.engine.post_at_once(lambda: self._post_small(tensor, op))

    # -- waited for ---------------------------------------------------------------------------------------------

    def all_reduce(self, tensor: Tensor, op: ReduceOp.RedOpType) -> None:
        """Reduce `tensor` over all ranks, in place."""
        if tensor.nbytes <= SMALL_BYTES:
            self._post_small(tensor, op).wait()
        elif self.engine.arena.offset_of(tensor) is not None:
            self._reduce_shared(tensor, op, self._scale_of(op))
        else:
            self._reduce_staged(tensor, op, self._scale_of(op))

    def broadcast(self, tensor: Tensor, root: int) -> None:
        """Copy the `tensor` of rank `root` to all ranks."""

        def fill(staged: Tensor, chunk: slice) -> None:
            if self.rank == root:
                staged.copy_(tensor[chunk])

        def take(chunk: slice, shown: list[Shown]) -> None:
            if self.rank != root:
                tensor[chunk].copy_(self.engine.operands(shown, tensor.dtype)[root])

        self._stage.stream(_header(Kind.broadcast, tensor, root=root), fill, take)

    def all_gather(self, outputs: Sequence[Tensor], tensor: Tensor) -> None:
        """Copy every rank's `tensor` into `outputs`, in rank order."""

        def take(chunk: slice, shown: list[Shown]) -> None:
            for output, part in zip(outputs, self.engine.operands(shown, tensor.dtype), strict=True):
                output[chunk].copy_(part)

        header = _header(Kind.all_gather, tensor)
        self._stage.stream(header, lambda staged, chunk: staged.copy_(tensor[chunk]), take)

    def reduce_scatter(self, output: Tensor, inputs: Sequence[Tensor], op: ReduceOp.RedOpType) -> None:
        """Reduce all ranks' inputs at this rank's index into `output`."""
        scale = self._scale_of(op)

        def fill(staged: Tensor, chunk: slice) -> None:
            for row, input_tensor in zip(staged.view(self.size, chunk.stop - chunk.start), inputs, strict=True):
                row.copy_(input_tensor[chunk])

        def compute(chunk: slice, shown: list[Shown]) -> None:
            count = chunk.stop - chunk.start
            rows = self.engine.operands(shown, output.dtype, slice(self.rank * count, (self.rank + 1) * count))
            reduce_into([output[chunk]], rows, op, scale)

        self._stage.stream(_header(Kind.reduce_scatter, output, op=op), fill, compute, rows=self.size)

    def barrier(self) -> None:
        """Wait until every rank has reached this point."""
        self.engine.post(Header(Kind.barrier), Shown(), lambda _: None).wait()

    # -- the three methods of all-reduce ------------------------------------------------------------------------

    def _post_small(self, tensor: Tensor, op: ReduceOp.RedOpType) -> Operation:
        return self._post_own(Kind.all_reduce, tensor, op, self._scale_of(op))

    def _post_own(self, kind: Kind, tensor: Tensor, op: ReduceOp.RedOpType, scale: float | None = None) -> Operation:
        """Copy the flat `tensor` to shared memory, and post an operation that every rank computes for itself."""
        engine, count, dtype = self.engine, tensor.numel(), tensor.dtype
        place = self._places.take(tensor.nbytes)
        offset = place.data_ptr() - engine.arena.address
        engine.arena.operand(offset, count, dtype).copy_(tensor)

        def compute(shown: list[Shown]) -> None:
            with recorder.span(REDUCE) if kind is Kind.own_sum else NOT_RECORDED:
                reduce_into([tensor], engine.operands(shown, dtype), op, scale)

        header = Header(kind, dtype, count, 0, code_of(op))
        operation = engine.post(header, Shown(count, offset), compute, is_own=True)
        self._places.keep(place, operation)
        return operation

    def _reduce_shared(self, tensor: Tensor, op: ReduceOp.RedOpType, scale: float | None) -> None:
        """Reduce a tensor in place: in one piece or, if another rank stages its tensor, in that rank's chunks."""
        start, total, length = 0, tensor.numel(), 0

        def compute(shown: list[Shown]) -> None:
            nonlocal length
            length = min(view.length for view in shown)
            self._reduce(tensor.dtype, op, scale, shown)

        while True:
            header = _header(Kind.all_reduce, tensor, start, op=op)
            self.engine.post(header, self.engine.shown(tensor[start:]), compute).wait()
            start += length
            if start >= total:
                return

    def _reduce_staged(self, tensor: Tensor, op: ReduceOp.RedOpType, scale: float | None) -> None:
        """Reduce a tensor in other memory, in chunks through the stage."""
        self._stage.stream(
            _header(Kind.all_reduce, tensor, op=op),
            fill=lambda staged, chunk: self._copy_others(staged, tensor[chunk]),
            compute=lambda chunk, shown: self._reduce(tensor.dtype, op, scale, shown, tensor[chunk]),
            end=lambda staged, chunk: self._copy_others(tensor[chunk], staged),
        )

    def _copy_others(self, target: Tensor, source: Tensor) -> None:
        """Copy the shares that other ranks reduce. This rank's own share never goes through the stage."""
        own_part = share(target.numel(), self.rank, self.size)
        for part in (slice(0, own_part.start), slice(own_part.stop, None)):
            target[part].copy_(source[part])

    def _reduce(
        self,
        dtype: torch.dtype,
        op: ReduceOp.RedOpType,
        scale: float | None,
        shown: list[Shown],
        chunk: Tensor | None = None,
    ) -> None:
        """Reduce this rank's share of all ranks' operands, and overwrite the share in every operand with the result.

        If `chunk` is given, it takes the place of this rank's own operand.
        """
        count = min(view.length for view in shown)
        own_part = share(count, self.rank, self.size)
        if own_part.start < own_part.stop:
            parts = self.engine.operands(shown, dtype, own_part)
            if chunk is not None:
                parts[self.rank] = chunk[own_part]
            # The sum is computed in this rank's memory and copied to the other ranks'. The parts stay in rank order,
            # because the order determines the bits.
            results = [parts[self.rank], *parts[: self.rank], *parts[self.rank + 1 :]]
            reduce_into(results, parts, op, scale)

    def _scale_of(self, op: ReduceOp.RedOpType) -> float | None:
        """Return the factor to apply to the sum, if any."""
        return 1 / self.size if op is ReduceOp.AVG else None


def _header(
    kind: Kind, tensor: Tensor, start: int = 0, *, op: ReduceOp.RedOpType | None = None, root: int = 0
) -> Header:
    """Describe an operation on `tensor` from element `start`."""
    return Header(kind, tensor.dtype, tensor.numel(), start, 0 if op is None else code_of(op), root)


class Stage:
    """Shared memory of one rank in one group for chunks of tensors in private memory.

    It has two halves. The next chunk is copied into one half while the ranks work on the chunk in the other.
    """

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


class Places:
    """Shared memory of one rank in one group for copies of tensors that it shows, reused once no rank reads them.

    Results are written to the original tensors.
    """

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._used: deque[tuple[Tensor, Operation]] = deque()
        """Places in use with their operations, oldest first; operations finish in this order."""
        self._lock = threading.Lock()
        """Held while taking a place."""

    def take(self, nbytes: int) -> Tensor:
        """Return a place of at least `nbytes`, as bytes."""
        with self._lock:
            while self._used and self._used[0][1].finished:
                place, _ = self._used.popleft()
                if place.numel() >= nbytes:
                    return place
                self._arena.free(place)
        return self._arena.allocate(max(1, -(-nbytes // SMALL_BYTES)) * SMALL_BYTES, torch.uint8)

    def keep(self, place: Tensor, operation: Operation) -> None:
        """Keep a place unchanged until `operation`, the latest one, is finished."""
        # No lock is needed: if two threads append out of order, a place is reused a little later, never too early.
        self._used.append((place, operation))
