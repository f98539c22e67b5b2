"""Files in memory that outlive the rank that writes them, with slots that are found whole, or not at all.

A slot begins with the number of its write, which is set to 0 first and written last. So a rank that is killed in the
middle of a write leaves the other slots.
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
"""Slots of a file, filled in turns: the step before, this one, perhaps twice, and a write that was cut off."""
Layout = Sequence[tuple[tuple[int, ...], str]]
"""Shape and dtype of tensors that follow one another."""
_HEAD = struct.Struct("<qqqq")  # number of the write, step, bytes of plain values, bytes of all
_FIRST = 64 * 2**10
"""Bytes of a slot at first."""


class SlotFile:
    """The file `path` of this rank, which replaces one that is there."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._number = 0
        """Number of the last write."""
        self._map = self._make(_FIRST)
        self._address = _address_of(self._map)

    def write(self, step: int, plain: bytes, tensors: Sequence[torch.Tensor]) -> None:
        """Write plain values, and tensors as :func:`as_stored` has them, into the next slot, as those of `step`."""
        sizes = [tensor.nbytes for tensor in tensors]
        total = aligned(_HEAD.size + len(plain)) + sum(map(aligned, sizes))
        if total > self._capacity:
            self._grow(total)
        self._number += 1
        at = self._number % SLOTS * self._capacity
        self._map[at : at + 8] = bytes(8)  # invalid until the last line, should the rank be killed in between
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

    def _grow(self, least: int) -> None:
        """Take a larger file, with the slots as they are; it takes the smaller one's place when it is whole."""
        self._map = self._make(least + _FIRST, self._map)
        self._address = _address_of(self._map)

    def _make(self, capacity: int, before: mmap.mmap | None = None) -> mmap.mmap:
        size = SLOTS * -(-capacity // mmap.PAGESIZE) * mmap.PAGESIZE
        # Under another name until it is whole: a rank may be killed here, and the slots so far must be found.
        new = self._path.with_name(f".{self._path.name}")
        with open(new, "w+b", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
            os.posix_fallocate(file.fileno(), 0, size)  # or a write into full memory would end the rank with SIGBUS
            made = mmap.mmap(file.fileno(), size)
        if before is not None:
            old, new_capacity = len(before) // SLOTS, size // SLOTS
            with memoryview(before) as content:
                for slot in range(SLOTS):
                    made[slot * new_capacity : slot * new_capacity + old] = content[slot * old : (slot + 1) * old]
        new.replace(self._path)
        return made


@dataclass(frozen=True)
class Slot:
    """A slot that was found whole."""

    number: int
    """Number of its write."""
    step: int
    plain: bytes
    at: int
    """The byte at which its tensors begin."""


def slots_in(content: bytearray | mmap.mmap) -> list[Slot]:
    """Return those slots of a file's `content` that are whole."""
    capacity, found = len(content) // SLOTS, []
    for at in range(0, SLOTS * capacity, capacity):
        number, step, plain, _ = _HEAD.unpack_from(content, at)
        if number > 0:
            begin = at + _HEAD.size
            found.append(Slot(number, step, bytes(content[begin : begin + plain]), at + aligned(_HEAD.size + plain)))
    return found


def tensors_in(content: bytearray | mmap.mmap, at: int, layout: Layout) -> list[torch.Tensor]:
    """Return the tensors that begin at a byte of `content`, where they lie in it."""
    tensors = []
    for shape, dtype in layout:
        spec = Spec(tuple(shape), dtype.removeprefix("torch."))
        tensor = spec.empty("cpu")
        if spec.nbytes:
            raw = torch.frombuffer(content, dtype=torch.uint8, count=spec.nbytes, offset=at)
            tensor = raw.view(tensor.dtype).reshape(spec.shape)
        tensors.append(tensor)
        at += aligned(spec.nbytes)
    return tensors


def layout_of(tensors: Sequence[torch.Tensor]) -> list[tuple[tuple[int, ...], str]]:
    """Return the layout of `tensors`, which are as they are stored."""
    return [(tuple(tensor.shape), str(tensor.dtype)) for tensor in tensors]


def as_stored(tensor: torch.Tensor) -> torch.Tensor:
    """Return the result of :func:`stored`, without its calls for a tensor that needs none, as nearly all."""
    is_so = tensor.is_contiguous() and tensor.device.type == "cpu" and not tensor.is_complex() and not tensor.is_neg()
    return tensor if is_so else stored(tensor)


def _address_of(memory: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))
