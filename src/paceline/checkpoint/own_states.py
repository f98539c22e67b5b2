"""The states that a rank alone has, kept in memory that outlives it: random generators, buffers, registered objects.

A file in the folder of the job's step records has four slots, which the rank fills in turns. A slot begins with the
number of its write, which is set to 0 first and written last, so a rank that is killed leaves the others whole: the
step before, and this step as it was when its gradients were there, which may be twice.

Plain values are stored by ``marshal``, which runs no code when it is read, and is fast.
"""

from __future__ import annotations

import ctypes
import marshal
import mmap
import os
import random
import struct
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from paceline.checkpoint.capture import Capture
from paceline.checkpoint.room import aligned
from paceline.checkpoint.tensorfile import Spec, stored
from paceline.rng import rng_state_of

_HEAD = struct.Struct("<qqqq")  # number of the write, step, bytes of plain values, bytes of all
_SLOTS = 4
_MT19937 = 624 * 4 + 4
"""Bytes of NumPy's Mersenne Twister: its words, and the position among them."""
_FIRST = 64 * 2**10
"""Bytes of a slot at first."""


@dataclass(frozen=True)
class OwnStates:
    """The states of one rank at one step."""

    generators: Mapping[str, Any]
    """As :func:`paceline.rng.rng_state` returns them."""
    objects: Capture
    """Of the objects that are registered as each rank's own."""
    buffers: Sequence[torch.Tensor]
    """Of registered modules, in a fixed order."""


class OwnStatesFile:
    """The file of one rank, written by it.

    Raises:
        OSError: if it cannot be made, or memory is full; also from :meth:`write`.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._number = path, 0
        self._map = self._make(_FIRST)
        self._address = _address_of(self._map)
        self._numpy: tuple[bytes, Any] | None = None
        """NumPy's generator as it was last, as it lies in memory and as it is stored."""
        self._plain: tuple[tuple[Any, ...], bytes] = (), b""
        """The plain values that were stored last, and their bytes."""

    def write(self, step: int, objects: Capture, buffers: Sequence[torch.Tensor]) -> None:
        """Store this rank's generators, and what is given, as its states at `step`."""
        tensors = [_as_stored(tensor) for tensor in (*objects.tensors.values(), *buffers)]
        layout = [(tuple(tensor.shape), str(tensor.dtype)) for tensor in tensors]
        names = list(objects.tensors)
        plain = self._dumped((self._generators(), dict(objects.nodes), dict(objects.aliases), names, layout))
        sizes = [tensor.nbytes for tensor in tensors]
        total = aligned(_HEAD.size + len(plain)) + sum(map(aligned, sizes))
        if total > self._capacity:
            self._grow(total)
        self._number += 1
        at = self._number % _SLOTS * self._capacity
        self._map[at : at + 8] = bytes(8)
        self._map[at + _HEAD.size : at + _HEAD.size + len(plain)] = plain
        place = at + aligned(_HEAD.size + len(plain))
        for tensor, size in zip(tensors, sizes, strict=True):
            if size:
                ctypes.memmove(self._address + place, tensor.data_ptr(), size)
            place += aligned(size)
        struct.pack_into("<qqq", self._map, at + 8, step, len(plain), total)
        struct.pack_into("<q", self._map, at, self._number)

    def _dumped(self, values: tuple[Any, ...]) -> bytes:
        """Return `values` as they are stored. At the end of a step they are often as before the optimizer."""
        if values != self._plain[0]:
            self._plain = values, marshal.dumps(values)
        return self._plain[1]

    def _generators(self) -> tuple[Any, ...]:
        """Return what :func:`paceline.rng.rng_state` tells, in the form that is taken and stored fastest."""
        in_cuda = torch.cuda.get_rng_state().numpy().tobytes() if torch.cuda.is_initialized() else None
        return torch.get_rng_state().numpy().tobytes(), random.getstate(), self._in_numpy(), in_cuda

    def _in_numpy(self) -> Any:
        """Return the state of NumPy's generator. Taking it costs more than all else, so it is looked at first.

        Its memory does not tell whether the second number of a pair is kept; but then the state was taken with it.
        """
        numpy = sys.modules.get("numpy")
        if numpy is None:
            return None
        generator = numpy.random.get_bit_generator()
        memory = b""
        if type(generator) is numpy.random.MT19937:
            memory = ctypes.string_at(generator.ctypes.state_address, _MT19937)
            if self._numpy is not None and self._numpy[0] == memory and not self._numpy[1][3]:
                return self._numpy[1]
        kind, keys, *rest = numpy.random.get_state()
        state = (kind, keys.tobytes(), *rest)
        self._numpy = (memory, state) if memory else None
        return state

    @property
    def _capacity(self) -> int:
        return len(self._map) // _SLOTS

    def _grow(self, least: int) -> None:
        """Take a larger file, with the slots as they are; it takes the smaller one's place when it is whole."""
        before, capacity = self._map, self._capacity
        slots = [bytes(before[slot * capacity : (slot + 1) * capacity]) for slot in range(_SLOTS)]
        self._map = self._make(2 * least, slots)
        self._address = _address_of(self._map)

    def _make(self, capacity: int, slots: Sequence[bytes] = ()) -> mmap.mmap:
        size = _SLOTS * -(-capacity // mmap.PAGESIZE) * mmap.PAGESIZE
        new = self._path.with_name(f".{self._path.name}")
        with open(new, "w+b", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
            os.posix_fallocate(file.fileno(), 0, size)  # or a write into full memory would end the rank with SIGBUS
            made = mmap.mmap(file.fileno(), size)
        for slot, content in enumerate(slots):
            made[slot * size // _SLOTS : slot * size // _SLOTS + len(content)] = content
        new.replace(self._path)
        return made


def read_own_states(path: Path, step: int, *, prepared: bool = False) -> OwnStates | None:
    """Return what the rank whose file is `path` stored last for `step`, or first if `prepared`; None if nothing.

    Raises:
        OSError: if the file cannot be read.
    """
    content = path.read_bytes()
    capacity = len(content) // _SLOTS
    found = [(*_HEAD.unpack_from(content, slot * capacity), slot * capacity) for slot in range(_SLOTS)]
    fitting = [entry for entry in found if entry[0] > 0 and entry[1] == step]
    if not fitting:
        return None
    _, _, plain, _, at = min(fitting) if prepared else max(fitting)
    generators, nodes, aliases, names, layout = marshal.loads(content[at + _HEAD.size : at + _HEAD.size + plain])
    place, tensors = at + aligned(_HEAD.size + plain), []
    for shape, dtype in layout:
        spec = Spec(shape, dtype.removeprefix("torch."))
        tensor = spec.empty("cpu")
        if spec.nbytes:
            raw = torch.frombuffer(bytearray(content[place : place + spec.nbytes]), dtype=torch.uint8)
            tensor = raw.view(tensor.dtype).reshape(spec.shape)
        tensors.append(tensor)
        place += aligned(spec.nbytes)
    objects = Capture(nodes, dict(zip(names, tensors, strict=False)), aliases)
    return OwnStates(_unpacked(generators), objects, tensors[len(names) :])


def _as_stored(tensor: torch.Tensor) -> torch.Tensor:
    """Return what :func:`stored` does, without its calls for a tensor that is so already, as nearly all are."""
    is_so = tensor.is_contiguous() and tensor.device.type == "cpu" and not tensor.is_complex() and not tensor.is_neg()
    return tensor if is_so else stored(tensor)


def _address_of(memory: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def _unpacked(generators: tuple[Any, ...]) -> dict[str, Any]:
    in_torch, in_python, in_numpy, in_cuda = generators
    if in_numpy is not None:
        import numpy  # loaded when the state was taken, so the run uses it

        kind, keys, *rest = in_numpy
        in_numpy = (kind, numpy.frombuffer(keys, dtype="uint32"), *rest)
    return rng_state_of(_bytes_of(in_torch), in_python, in_numpy, None if in_cuda is None else _bytes_of(in_cuda))


def _bytes_of(content: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)
