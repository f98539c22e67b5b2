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
from paceline.comm.shm.engine import Engine, Operation
from paceline.comm.shm.header import Header, Kind, Note
from paceline.errors import DesyncError, UsageError

STAGE_BYTES = 4 * 2**20
"""Bytes of one half of the stage; measured in ``benchmarks/collectives.py``."""
HALVES = 2
SMALL_BYTES = 4096
"""Tensors up to this size are reduced by every rank for itself: fewer bytes are saved than a second signal costs."""
Begun = tuple[Header, Callable[[list[Header]], None]]
"""What is posted of an operation: its header, and its work."""


class Collectives:
    """What ranks of one host do together. Operands are flat and contiguous, of native dtypes."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.place = engine.members.index(engine.rank)
        self.size = len(engine.members)
        self._stage: Tensor | None = None
        self._small: Tensor | None = None
        self._small_turn = 0
        self._small_under_way: deque[Operation] = deque()

    # -- all-reduce ---------------------------------------------------------------------------------------------

    def all_reduce(self, tensor: Tensor, op: ReduceOp.RedOpType) -> None:
        """Reduce `tensor` over all ranks, in place."""
        scale = 1 / self.size if op is ReduceOp.AVG else None
        if 0 < tensor.numel() * tensor.element_size() <= SMALL_BYTES:
            self._all_reduce_small(tensor, op, scale)
            return
        if self._engine.arena.offset_of(tensor) is not None:
            self._all_reduce_shared(tensor, op, scale)
            return

        def begin(turn: int, start: int, count: int) -> Begun:
            staged, chunk = self._half(tensor.dtype, turn)[:count], tensor[start : start + count]
            self._copy_others(staged, chunk)
            header = self._header(Kind.all_reduce, tensor, start, count, staged, code_of(op))
            return header, partial(self._reduce, op, scale, chunk=chunk)

        def end(turn: int, start: int, count: int) -> None:
            self._copy_others(tensor[start : start + count], self._half(tensor.dtype, turn)[:count])

        self._stream(tensor.numel(), self._half(tensor.dtype).numel(), begin, end)

    def _all_reduce_small(self, tensor: Tensor, op: ReduceOp.RedOpType, scale: float | None) -> None:
        """Reduce a small tensor as soon as everybody has shown theirs, without waiting until everybody has done so.

        What is shown lies in one half of a stage, which is written to again when everybody is done with it.
        """
        if self._small is None:
            self._small = self._engine.arena.allocate(HALVES * SMALL_BYTES, torch.uint8)
        if len(self._small_under_way) == HALVES:
            self._engine.wait(self._small_under_way.popleft())
        self._small_turn = 1 - self._small_turn
        shown = self._small[self._small_turn * SMALL_BYTES :][: tensor.numel() * tensor.element_size()].view(
            tensor.dtype
        )
        shown.copy_(tensor)
        header = self._header(Kind.all_reduce, tensor, 0, tensor.numel(), shown, code_of(op))

        def compute(headers: list[Header]) -> None:
            reduce_into([tensor], self._operands(headers), op, scale)

        operation = self._engine.post(header, compute)
        self._engine.agree(operation)
        self._small_under_way.append(operation)

    def _copy_others(self, target: Tensor, source: Tensor) -> None:
        """Copy the shares that other ranks reduce; this rank's own never goes through the stage."""
        mine = share(target.numel(), self.place, self.size)
        for part in (slice(0, mine.start), slice(mine.stop, None)):
            target[part].copy_(source[part])

    def _all_reduce_shared(self, tensor: Tensor, op: ReduceOp.RedOpType, scale: float | None) -> None:
        """Reduce a tensor where it lies, all at once; where another rank stages its own, in that rank's chunks."""
        start, total, taken = 0, tensor.numel(), 0

        def compute(headers: list[Header]) -> None:
            nonlocal taken
            taken = min(header.ready for header in headers)
            self._reduce(op, scale, headers)

        while True:
            rest = tensor[start:]
            header = self._header(Kind.all_reduce, tensor, start, total - start, rest, code_of(op))
            self._engine.run(header, compute)
            start += taken
            if start >= total:
                return

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
        if self._engine.arena.offset_of(tensor) is None:
            raise UsageError("a reduction can be launched of a tensor that the group's allocate() gave, no other")
        count = tensor.numel()
        kind = Kind.launched_all_reduce
        header = self._header(kind, tensor, 0, count, tensor, code_of(op), note=note or (0.0, 0.0))

        def compute(headers: list[Header]) -> None:
            self._reduce(op, scale if factor is None else factor([one.note for one in headers]), headers)

        return self._engine.post(header, compute)

    def _reduce(
        self, op: ReduceOp.RedOpType, scale: float | None, headers: list[Header], chunk: Tensor | None = None
    ) -> None:
        """This rank's share of an all-reduce: read everybody's, write to everybody's.

        Its own is read from and written to `chunk`, if that is given, and else to where its header says.
        """
        count = min(header.ready for header in headers)
        mine = share(count, self.place, self.size)
        if mine.start < mine.stop:
            operands = self._operands(headers)
            if chunk is not None:
                operands[self.place] = chunk
            parts = [operand[mine] for operand in operands]
            own = parts[self.place]
            reduce_into([own, *(part for part in parts if part is not own)], parts, op, scale)

    # -- the others ---------------------------------------------------------------------------------------------

    def broadcast(self, tensor: Tensor, root: int) -> None:
        """Make `tensor` equal to that of the rank in place `root`."""

        def begin(turn: int, start: int, count: int) -> Begun:
            chunk, staged = tensor[start : start + count], self._half(tensor.dtype, turn)[:count]
            if self.place == root:
                staged.copy_(chunk)

            def take(headers: list[Header]) -> None:
                if self.place != root:
                    chunk.copy_(self._operands(headers)[root])

            return self._header(Kind.broadcast, tensor, start, count, staged, root=root), take

        self._stream(tensor.numel(), self._half(tensor.dtype).numel(), begin)

    def all_gather(self, outputs: Sequence[Tensor], tensor: Tensor) -> None:
        """Every rank's `tensor`, into `outputs` in the order of ranks."""

        def begin(turn: int, start: int, count: int) -> Begun:
            staged = self._half(tensor.dtype, turn)[:count]
            staged.copy_(tensor[start : start + count])

            def take(headers: list[Header]) -> None:
                for output, part in zip(outputs, self._operands(headers), strict=True):
                    output[start : start + count].copy_(part)

            return self._header(Kind.all_gather, tensor, start, count, staged), take

        self._stream(tensor.numel(), self._half(tensor.dtype).numel(), begin)

    def reduce_scatter(self, output: Tensor, inputs: Sequence[Tensor], op: ReduceOp.RedOpType) -> None:
        """The reduction over all ranks of their input number `place`, into `output`."""
        scale = 1 / self.size if op is ReduceOp.AVG else None

        def begin(turn: int, start: int, count: int) -> Begun:
            staged = self._half(output.dtype, turn)[: count * self.size]
            for row, given in zip(staged.view(self.size, count), inputs, strict=True):
                row.copy_(given[start : start + count])

            def compute(headers: list[Header]) -> None:
                rows = [part[self.place * count : (self.place + 1) * count] for part in self._operands(headers)]
                reduce_into([output[start : start + count]], rows, op, scale)

            header = self._header(Kind.reduce_scatter, output, start, count * self.size, staged, code_of(op))
            return header, compute

        self._stream(output.numel(), max(1, self._half(output.dtype).numel() // self.size), begin)

    def reduce(self, tensor: Tensor, op: ReduceOp.RedOpType, root: int) -> None:
        """Reduce `tensor` over all ranks, into that of the rank in place `root`; the others keep theirs."""
        scale = 1 / self.size if op is ReduceOp.AVG else None

        def begin(turn: int, start: int, count: int) -> Begun:
            staged = self._half(tensor.dtype, turn)[:count]
            staged.copy_(tensor[start : start + count])

            def compute(headers: list[Header]) -> None:
                mine = share(count, self.place, self.size)
                parts = [part[mine] for part in self._operands(headers)]
                reduce_into([parts[root]], parts, op, scale)

            return self._header(Kind.reduce, tensor, start, count, staged, code_of(op), root), compute

        def end(turn: int, start: int, count: int) -> None:
            if self.place == root:
                tensor[start : start + count].copy_(self._half(tensor.dtype, turn)[:count])

        self._stream(tensor.numel(), self._half(tensor.dtype).numel(), begin, end)

    def gather(self, outputs: Sequence[Tensor], tensor: Tensor, root: int) -> None:
        """Every rank's `tensor`, into `outputs` of the rank in place `root`; the others give none."""

        def begin(turn: int, start: int, count: int) -> Begun:
            staged = self._half(tensor.dtype, turn)[:count]
            staged.copy_(tensor[start : start + count])

            def take(headers: list[Header]) -> None:
                if self.place == root:
                    for output, part in zip(outputs, self._operands(headers), strict=True):
                        output[start : start + count].copy_(part)

            return self._header(Kind.gather, tensor, start, count, staged, root=root), take

        self._stream(tensor.numel(), self._half(tensor.dtype).numel(), begin)

    def scatter(self, output: Tensor, inputs: Sequence[Tensor], root: int) -> None:
        """Input number `place` of the rank in place `root`, into `output`; the others give no inputs."""

        def begin(turn: int, start: int, count: int) -> Begun:
            staged = self._half(output.dtype, turn)[: count * self.size]
            if self.place == root:
                for row, given in zip(staged.view(self.size, count), inputs, strict=True):
                    row.copy_(given[start : start + count])

            def take(headers: list[Header]) -> None:
                rows = self._operands(headers)[root]
                output[start : start + count].copy_(rows[self.place * count : (self.place + 1) * count])

            return self._header(Kind.scatter, output, start, count * self.size, staged, root=root), take

        self._stream(output.numel(), max(1, self._half(output.dtype).numel() // self.size), begin)

    def all_to_all(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
        """Input number `p` goes to the rank in place `p`, of which output number `p` comes; lengths may differ.

        Raises:
            DesyncError: on every rank, if one sends more or less than another expects.
        """
        dtype, place, size = inputs[0].dtype, self.place, self.size
        longest = self._longest_exchange(outputs, inputs)

        def begin(turn: int, start: int, count: int) -> Begun:
            staged = self._half(dtype, turn)[: count * size]
            for row, given in zip(staged.view(size, count), inputs, strict=True):
                piece = given[start : start + count]
                row[: piece.numel()].copy_(piece)

            def take(headers: list[Header]) -> None:
                for output, rows in zip(outputs, self._operands(headers), strict=True):
                    piece = output[start : start + count]
                    piece.copy_(rows[place * count : place * count + piece.numel()])

            header = self._header(Kind.all_to_all, inputs[0], start, count * size, staged)
            return header._replace(total=longest), take

        if longest:
            self._stream(longest, max(1, self._half(dtype).numel() // size), begin)

    def _longest_exchange(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> int:
        """Tell all ranks who sends how much to whom; the length of the longest."""
        staged = self._half(torch.int64)[: 2 * self.size].view(2, self.size)
        staged.copy_(torch.tensor([[one.numel() for one in some] for some in (inputs, outputs)], device="cpu"))
        said: list[list[list[int]]] = []

        def take(headers: list[Header]) -> None:
            for memory, header in zip(self._engine.memories, headers, strict=True):
                said.append(memory.tensor(header.offset, 2 * self.size, torch.int64).view(2, self.size).tolist())

        self._engine.run(self._header(Kind.all_to_all, inputs[0], 0, 1, staged)._replace(total=-1), take)
        names = self._engine.names
        for sender, (sends, _) in enumerate(said):
            for receiver, (_, expects) in enumerate(said):
                if sends[receiver] != expects[sender]:
                    raise DesyncError(
                        f"rank {names[self.place]}: in all_to_all, rank {names[sender]} sends {sends[receiver]} "
                        f"elements to rank {names[receiver]}, which expects {expects[sender]}; make them equal"
                    )
        return max(max(sends) for sends, _ in said)

    def barrier(self) -> None:
        """Wait until every rank has come here."""
        self._engine.run(Header(Kind.barrier), lambda _: None)

    # -- chunks through the stage -------------------------------------------------------------------------------

    def _stream(
        self,
        total: int,
        length: int,
        begin: Callable[[int, int, int], Begun],
        end: Callable[[int, int, int], None] | None = None,
    ) -> None:
        """Send `total` elements through the stage in chunks of `length`, each of them one operation.

        ``begin(turn, start, count)`` fills the half of the stage and describes the operation, ``end`` with the same
        arguments follows when it is finished.
        """
        under_way: deque[tuple[Operation, tuple[int, int, int]]] = deque()

        def finish() -> None:
            operation, chunk = under_way.popleft()
            self._engine.wait(operation)
            if end is not None:
                end(*chunk)

        for turn, start in enumerate(range(0, max(1, total), length)):
            if len(under_way) == HALVES:
                finish()
            chunk = (turn, start, min(length, total - start))
            header, compute = begin(*chunk)
            if turn == 1:  # if ranks differ in what they do, all of them stop before the second operation
                self._engine.agree(under_way[0][0])
            under_way.append((self._engine.post(header, compute), chunk))
        while under_way:
            finish()

    def _header(
        self,
        kind: Kind,
        tensor: Tensor,
        start: int,
        count: int,
        operand: Tensor,
        reduce: int = 0,
        root: int = 0,
        note: Note = (0.0, 0.0),
    ) -> Header:
        offset = operand.data_ptr() - self._engine.arena.address if count else 0
        return Header(kind, tensor.dtype, tensor.numel(), start, reduce, root, count, offset, note)

    def _operands(self, headers: Sequence[Header]) -> list[Tensor]:
        pairs = zip(self._engine.memories, headers, strict=True)
        return [memory.tensor(header.offset, header.ready, header.dtype) for memory, header in pairs]

    def _half(self, dtype: torch.dtype, turn: int = 0) -> Tensor:
        """One half of the stage, as elements of `dtype`."""
        if self._stage is None:
            self._stage = self._engine.arena.allocate(HALVES * STAGE_BYTES, torch.uint8)
        start = turn % HALVES * STAGE_BYTES
        return self._stage[start : start + STAGE_BYTES].view(dtype)
