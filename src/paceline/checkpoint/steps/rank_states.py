"""A rank's own states, kept in memory that outlives the rank: random generators, buffers, registered objects.

The rank fills four slots of a file in turn; see :mod:`paceline.checkpoint.steps.slot_file`. If the rank is killed, the
file still has its states at the end of the previous step and at the barrier of the current step.

Plain values are stored with ``marshal``, which is fast and runs no code when it is read.
"""

from __future__ import annotations

import ctypes
import marshal
import random
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from paceline.checkpoint.captures import Capture
from paceline.checkpoint.steps.slot_file import SlotFile, as_stored, layout_of, slots_in, tensors_in
from paceline.core.state.rng import rng_state_of

_MT19937 = 624 * 4 + 4
"""Size in bytes of the state of NumPy's Mersenne Twister: its words, and the position in them."""


@dataclass(frozen=True)
class OwnStates:
    """The states of one rank at one step."""

    generators: Mapping[str, Any]
    """Random generators, in the form of :func:`paceline.core.state.rng.rng_state`."""
    objects: Capture
    """States of the objects registered with ``per_rank``."""
    buffers: Sequence[torch.Tensor]
    """Buffers of registered modules, in a fixed order."""


class OwnStatesFile:
    """The file of one rank's states."""

    def __init__(self, path: Path) -> None:
        self._file = SlotFile(path)
        self._numpy: tuple[bytes, Any] | None = None
        """The latest state of NumPy's generator: its memory, and its stored form."""
        self._plain: tuple[tuple[Any, ...], bytes] = (), b""
        """The latest plain values and their bytes, reused because an optimizer step often leaves them unchanged."""

    def write(self, step: int, objects: Capture, buffers: Sequence[torch.Tensor]) -> None:
        """Store this rank's generators, `objects` and `buffers` as its states at `step`."""
        tensors = [as_stored(tensor) for tensor in (*objects.tensors.values(), *buffers)]
        names = list(objects.tensors)
        values = (self._generators(), dict(objects.nodes), dict(objects.aliases), names, layout_of(tensors))
        if values != self._plain[0]:
            self._plain = values, marshal.dumps(values)
        self._file.write(step, self._plain[1], tensors)

    def _generators(self) -> tuple[Any, ...]:
        """Return the content of :func:`paceline.core.state.rng.rng_state` in a form that is fast to store."""
        in_cuda = torch.cuda.get_rng_state().numpy().tobytes() if torch.cuda.is_initialized() else None
        return torch.get_rng_state().numpy().tobytes(), random.getstate(), self._in_numpy(), in_cuda

    def _in_numpy(self) -> Any:
        """Return the state of NumPy's generator, which is cached because numpy.random.get_state() is slow.

        The generator's memory does not show whether it keeps the second number of a pair for the next call, so a cached
        state that includes such a number is not used.
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


def read_own_states(path: Path, step: int, *, prepared: bool = False) -> OwnStates | None:
    """Return the latest states for `step` in a rank's file, or the first with `prepared`; None if there are none."""
    content = bytearray(path.read_bytes())
    fitting = [slot for slot in slots_in(content) if slot.step == step]
    if not fitting:
        return None
    slot = (min if prepared else max)(fitting, key=lambda slot: slot.number)
    generators, nodes, aliases, names, layout = marshal.loads(slot.plain)
    tensors = tensors_in(content, slot.at, layout)
    objects = Capture(nodes, dict(zip(names, tensors, strict=False)), aliases)
    return OwnStates(_unpacked(generators), objects, tensors[len(names) :])


def _unpacked(generators: tuple[Any, ...]) -> dict[str, Any]:
    in_torch, in_python, in_numpy, in_cuda = generators
    if in_numpy is not None:
        import numpy  # was loaded when the state was taken

        kind, keys, *rest = in_numpy
        in_numpy = (kind, numpy.frombuffer(keys, dtype="uint32"), *rest)
    return rng_state_of(_bytes_of(in_torch), in_python, in_numpy, None if in_cuda is None else _bytes_of(in_cuda))


def _bytes_of(content: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)
