"""Files in memory that outlive their rank, with slots that are either complete or invalid.

A slot begins with its write number, which is set to 0 first and written last. If a rank is killed during a write, the
other slots stay valid.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from paceline.checkpoint.format.safetensors_file import Spec, stored
from paceline.checkpoint.storage.free_space import aligned

SLOTS = 4
"""Slots of a file, filled in turn: the barrier and the end of the previous step and of the current step."""
Layout = Sequence[tuple[tuple[int, ...], str]]
"""Shapes and dtypes of consecutive tensors."""
_HEAD = struct.Struct("<qqqq")  # write number, step, size of plain values, total size
_FIRST = 64 * 2**10
"""Initial size of a slot in bytes."""


class SlotFile:
    """This rank's file `path`; an existing file is replaced."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._number = 0
        """Number of the last write."""
        self._map = self._make(_FIRST)
        self._address = _address_of(self._map)

    def write(self, step: int, plain: bytes, tensors: Sequence[torch.Tensor]) -> None:
        """Write plain values and tensors (in the form of :func:`as_stored`) for `step` into the next slot."""
        sizes = [tensor.nbytes for tensor in tensors]
        total = aligned(_HEAD.size + len(plain)) + sum(map(aligned, sizes))
        if total > self._capacity:
            self._grow(total)
        self._number += 1
        at = self._number % SLOTS * self._capacity
        self._map[at : at + 8] = bytes(8)  # the slot is invalid until the last line
        self._map[at + _HEAD.size : at + _HEAD.size + len(plain)] = plain
        place = at + aligned(_HEAD.size + len(plain))
        for tensor, size in zip(tensors, sizes, strict=True):
            if size:
                ctypes.memmove(self._address + place, tensor.data_ptr(), size)
            place += aligned(size)
        struct.pack_into("<qqq", self._map, at + 8, step, len(plain), total)
        struct.pack_into("<q", self._map, at, self._number)

    @property
    def _capacity(self) -> int:
        return len(self._map) // SLOTS

    def _grow(self, minimum: int) -> None:
        """Replace the file with a larger one that has the same slots."""
        self._map = self._make(minimum + _FIRST, self._map)
        self._address = _address_of(self._map)

    def _make(self, capacity: int, previous: mmap.mmap | None = None) -> mmap.mmap:
        size = SLOTS * -(-capacity // mmap.PAGESIZE) * mmap.PAGESIZE
        # Built under another name, so that the old slots survive if the rank is killed here.
        new = self._path.with_name(f".{self._path.name}")
        with open(new, "w+b", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
            os.posix_fallocate(file.fileno(), 0, size)  # otherwise, a write into full memory causes a SIGBUS
            mapping = mmap.mmap(file.fileno(), size)
        if previous is not None:
            old, new_capacity = len(previous) // SLOTS, size // SLOTS
            with memoryview(previous) as content:
                for slot in range(SLOTS):
                    mapping[slot * new_capacity : slot * new_capacity + old] = content[slot * old : (slot + 1) * old]
        new.replace(self._path)
        return mapping


@dataclass(frozen=True)
class Slot:
    """A whole slot."""

    number: int
    step: int
    plain: bytes
    at: int
    """Offset of its tensors in bytes."""


def slots_in(content: bytearray | mmap.mmap) -> list[Slot]:
    """Return the complete slots of a file's `content`."""
    capacity, slots = len(content) // SLOTS, []
    for at in range(0, SLOTS * capacity, capacity):
        number, step, plain, _ = _HEAD.unpack_from(content, at)
        if number > 0:
            begin = at + _HEAD.size
            slots.append(Slot(number, step, bytes(content[begin : begin + plain]), at + aligned(_HEAD.size + plain)))
    return slots


def tensors_in(content: bytearray | mmap.mmap, at: int, layout: Layout) -> list[torch.Tensor]:
    """Return views of the tensors that begin at offset `at` of `content`."""
    tensors = []
    for shape, dtype in layout:
        spec = Spec(tuple(shape), dtype.removeprefix("torch."))
        if spec.nbytes:
            memory = torch.frombuffer(content, dtype=torch.uint8, count=spec.nbytes, offset=at)
            tensors.append(memory.view(getattr(torch, spec.dtype)).view(spec.shape))
        else:
            tensors.append(spec.empty())
        at += aligned(spec.nbytes)
    return tensors


def layout_of(tensors: Sequence[torch.Tensor]) -> list[tuple[tuple[int, ...], str]]:
    """Return the layout of `tensors`."""
    return [(tuple(tensor.shape), str(tensor.dtype)) for tensor in tensors]


def as_stored(tensor: torch.Tensor) -> torch.Tensor:
    """Return the result of :func:`stored`, fast for tensors that are already in this form."""
    is_stored = (
        tensor.is_contiguous() and tensor.device.type == "cpu" and not tensor.is_complex() and not tensor.is_neg()
    )
    return tensor if is_stored else stored(tensor)


def _address_of(memory: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))
