"""The header: a rank's description of an operation and of the operand that it shows, in a slot of its shared memory."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

import torch

from paceline.comm.arithmetic import name_of
from paceline.comm.shm_arena import Segment
from paceline.core.missing_ranks import ranks_by_value
from paceline.errors import DesyncError

SLOTS = 256
"""Number of slots per rank, which operations use in turn. At most one fewer operation may be in progress."""
_SAME = struct.Struct("@7q")
_SHOWN = struct.Struct("@2q")
SLOTS_AT = 64
"""Byte of the first slot; the reports of :mod:`.board` lie before it."""
_SLOT_BYTES = 128  # both structs, rounded up to whole cache lines
END_OF_SLOTS = SLOTS_AT + SLOTS * _SLOT_BYTES
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
_CODES = {dtype: code for code, dtype in enumerate(DTYPES)}


class Kind(IntEnum):
    """The collective of an operation."""

    all_reduce = 1
    broadcast = 2
    all_gather = 3
    reduce_scatter = 4
    barrier = 5
    launched_all_reduce = 6
    """An all-reduce that was launched; all ranks' operands lie in shared memory."""
    launched_gather = 7
    """Copies from other ranks' memory into tensors of this rank."""
    own_sum = 8
    """A launched all-reduce that each rank computes itself from the operands that all ranks show."""


_REDUCES = (Kind.all_reduce, Kind.reduce_scatter, Kind.launched_all_reduce, Kind.own_sum)


class Header(NamedTuple):
    """The description of an operation, which must be equal on every rank."""

    kind: Kind
    dtype: torch.dtype = torch.uint8
    total: int = 0
    """Number of elements in the whole collective, or in a rank's part for a gather or scatter."""
    start: int = 0
    """Index of the operation's first element within these."""
    reduce: int = 0
    """Code of the reduction, from :func:`arithmetic.code_of`."""
    root: int = 0

    def __str__(self) -> str:
        if self.kind is Kind.barrier:
            return "barrier"
        name = "shared all_reduce" if self.kind in (Kind.launched_all_reduce, Kind.own_sum) else self.kind.name
        text = f"{name} of {self.total} × {str(self.dtype).removeprefix('torch.')}"
        if self.kind in _REDUCES:
            text += f" by {name_of(self.reduce)}"
        return text + (f" from element {self.start}" if self.start else "")


class Shown(NamedTuple):
    """The position of a rank's operand in its shared memory."""

    length: int = 0
    """Number of elements; it differs between ranks if some stage a tensor and others share it."""
    offset: int = 0
    """Offset of the first element in the rank's memory, in bytes."""


def write(segment: Segment, number: int, header: Header, shown: Shown) -> None:
    """Write `header` and `shown` into the slot of operation `number`."""
    kind, dtype, *numbers = header
    at = SLOTS_AT + number % SLOTS * _SLOT_BYTES
    _SAME.pack_into(segment.memory, at, number, kind, _CODES[dtype], *numbers)
    _SHOWN.pack_into(segment.memory, at + _SAME.size, *shown)


def read_shown(segments: Sequence[Segment], number: int) -> list[Shown] | None:
    """Return each rank's operand of operation `number`; None if the headers differ."""
    at = SLOTS_AT + number % SLOTS * _SLOT_BYTES
    end = at + _SAME.size
    # Compare bytes, because decoding would take several times as long.
    first = segments[0].memory[at:end]
    shown = []
    for segment in segments:
        if segment.memory[at:end] != first:
            return None
        shown.append(Shown._make(_SHOWN.unpack_from(segment.memory, end)))
    return shown


def read_header(segment: Segment, number: int) -> Header:
    """Return the header of operation `number`, which the rank with this memory has posted."""
    _, kind, dtype, *numbers = _SAME.unpack_from(segment.memory, SLOTS_AT + number % SLOTS * _SLOT_BYTES)
    return Header._make((Kind(kind), DTYPES[dtype], *numbers))


def mismatch(number: int, headers: Sequence[Header], names: Sequence[int], name: int) -> DesyncError:
    """Return the error for ranks that posted different operations under the same `number`.

    Args:
        number: the operation's number.
        headers: the headers of all ranks.
        names: the ranks' names in error messages.
        name: this rank's name.
    """
    descriptions = []
    for header in headers:
        description = str(header)
        if header.kind is Kind.broadcast and 0 <= header.root < len(names):
            description += f" from rank {names[header.root]}"
        descriptions.append(description)
    groups = ranks_by_value(zip(names, descriptions, strict=True))
    parts = "; ".join(f"rank {', '.join(map(str, ranks))}: {description}" for description, ranks in groups.items())
    return DesyncError(
        f"rank {name}: ranks are out of step in operation {number} of this group ({parts}); "
        "call the same collectives in the same order, with equal shapes and dtypes, on every rank"
    )
