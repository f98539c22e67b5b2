"""The header: a rank's description of an operation, in a slot of its shared memory."""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import NamedTuple

import torch
from torch import Tensor

from paceline.comm.arithmetic import name_of
from paceline.comm.shm.arena import Segment

SLOTS = 256
"""Operations that may be under way at once."""
Note = tuple[float, float]
"""Two numbers that travel with an operation for the caller, such as a weight."""
_HEADER = struct.Struct("@9q2d")
_SLOTS_AT = 64  # byte of the first slot
_SLOT_BYTES = 128  # the header, rounded up to whole cache lines
DTYPES = (
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.complex128,
)


class Kind(IntEnum):
    """Collective that an operation belongs to. Ranks that post different kinds under one number are out of step."""

    all_reduce = 1
    broadcast = 2
    all_gather = 3
    reduce_scatter = 4
    barrier = 5
    launched_all_reduce = 6
    """An all-reduce that was launched; all ranks' operands lie in shared memory."""
    launched_gather = 7
    """A gather that was launched, in place; all ranks' operands lie in shared memory."""
    launched_reduce_scatter = 8
    """A reduce-scatter that was launched, in place; all ranks' operands lie in shared memory."""


_REDUCES = (Kind.all_reduce, Kind.reduce_scatter, Kind.launched_all_reduce, Kind.launched_reduce_scatter)


class Header(NamedTuple):
    """A rank's description of an operation. The first six fields must be equal on every rank."""

    kind: Kind
    dtype: torch.dtype = torch.uint8
    total: int = 0
    """Elements of the whole collective; of this rank's part where ranks have parts."""
    start: int = 0
    """Index of the operation's first element among these."""
    reduce: int = 0
    """Code of the reduction, from :func:`arithmetic.code_of`."""
    root: int = 0
    ready: int = 0
    """Elements that this rank has ready. The numbers differ where some ranks stage a tensor and others share it."""
    offset: int = -1
    """Offset of the operand in the rank's memory, in bytes."""
    note: Note = (0.0, 0.0)

    @classmethod
    def of(
        cls,
        kind: Kind,
        segment: Segment,
        operand: Tensor,
        tensor: Tensor,
        start: int,
        *,
        reduce: int = 0,
        root: int = 0,
        note: Note = (0.0, 0.0),
    ) -> Header:
        """Describe an operation on `tensor` from element `start`, whose `operand` lies in this rank's `segment`."""
        ready = operand.numel()
        offset = operand.data_ptr() - segment.address if ready else 0
        return cls(kind, tensor.dtype, tensor.numel(), start, reduce, root, ready, offset, note)

    def write(self, segment: Segment, number: int) -> None:
        """Write the header into the slot of operation `number`."""
        kind, dtype, *numbers, note = self
        _HEADER.pack_into(segment.memory, _slot(number), number, kind, DTYPES.index(dtype), *numbers, *note)

    @classmethod
    def read(cls, segment: Segment, number: int) -> Header | None:
        """Return the header of operation `number`; None if its slot holds another operation."""
        written, kind, dtype, *numbers, first, second = _HEADER.unpack_from(segment.memory, _slot(number))
        if written != number:
            return None
        return cls._make((Kind(kind), DTYPES[dtype], *numbers, (first, second)))

    def same_as(self, other: Header) -> bool:
        """Return whether both describe the same operation."""
        return self[:6] == other[:6]

    def __str__(self) -> str:
        if self.kind is Kind.barrier:
            return "barrier"
        name = "shared all_reduce" if self.kind is Kind.launched_all_reduce else self.kind.name
        text = f"{name} of {self.total} × {str(self.dtype).removeprefix('torch.')}"
        if self.kind in _REDUCES:
            text += f" by {name_of(self.reduce)}"
        return text + (f" from element {self.start}" if self.start else "")


def _slot(number: int) -> int:
    return _SLOTS_AT + number % SLOTS * _SLOT_BYTES
