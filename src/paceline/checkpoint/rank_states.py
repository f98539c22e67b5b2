"""A rank's own states, kept in memory that outlives the rank, and the barrier at which all ranks store them.

The states are random generators, buffers and registered objects. The rank fills four files in turn. If it is killed,
they still have its states at the end of the previous step and at the barrier of the current step. A file begins with
the number of its write, which is set to 0 first and written last, so that a file is either complete or not used.

Plain values are stored with ``marshal``, which is fast and runs no code when it is read.
"""

from __future__ import annotations

import ctypes
import itertools
import marshal
import mmap
import os
import random
import struct
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from paceline.checkpoint.captures import Capture
from paceline.checkpoint.safetensors_file import Spec, bytes_of, stored
from paceline.core.host import is_running
from paceline.core.missing_ranks import REMEDY, named_ranks
from paceline.core.rng import rng_state_of
from paceline.core.spans import COLLECTIVE, recorder
from paceline.core.step_progress import StepRecord, record_path
from paceline.errors import CommunicationError

OwnStates = dict[tuple[str, Any], Any]
"""The states of one rank at one step. The keys are ``("random generator", name)``, ``("object", name)`` and
``("buffer", number)``. The values can be compared with ``==``: a tensor is its spec and its bytes."""
_FILES = 4
_HEAD = struct.Struct("<qqq")  # number of the write, step, size of the plain values
_RESERVED = 64 * 2**10
"""Bytes that a file has from the beginning, so that a lack of memory is noticed at once."""
_SPINS = 100
"""Number of polls before this rank starts to sleep between polls."""
_SLEEP_S = 50e-6
_LOOK_S = 0.005
"""Interval between checks that absent ranks are still running."""
_GENERATORS = ("torch", "python", "numpy", "cuda")
_MT19937 = 624 * 4 + 4
"""Size in bytes of the state of NumPy's Mersenne Twister: its words, and the position in them."""


class StepBarrier:
    """The barrier before an optimizer step: no rank passes before every rank has stored its own states for that step.

    Decision 0033 explains the design.

    Args:
        folder: the folder of records, which all ranks share.
        rank: this rank.
        size: the world size.
        timeout: longest time to wait for a rank, in seconds.
        record: this rank's record in the folder; a new one by default.
    """

    def __init__(self, folder: Path, rank: int, size: int, timeout: float, record: StepRecord | None = None) -> None:
        self.folder, self.size, self.rank, self._timeout = folder, size, rank, timeout
        self._states = OwnStatesFiles(states_path(folder, rank))
        self.record = record or StepRecord(record_path(folder, rank), make=True)
        self._completed_at: float | None = None
        """Time of the last step."""
        self._others: dict[int, StepRecord] = {}
        """Step records of the other ranks, opened when they are first needed."""

    def prepare(self, step: int, objects: Sequence[Capture], buffers: Sequence[torch.Tensor], requests: int = 0) -> int:
        """Store this rank's own states at `step`, and wait until every rank has done so.

        Args:
            step: the step that all ranks are about to take.
            objects: the state of each object registered with ``per_rank``.
            buffers: buffers of registered modules.
            requests: this rank's requests to stop, as bits.

        Returns:
            The requests of all ranks, combined with *or*; the same on all ranks.
        """
        self._states.write(step, objects, buffers)
        self.record.prepare(step, requests)
        waiting = self._absent(step, range(self.size))
        if waiting:
            with recorder.span(COLLECTIVE):
                self._wait(step, waiting)
        for other in self._others.values():
            requests |= other.stop_requests(step)
        return requests

    @property
    def is_left(self) -> bool:
        """Whether another rank has stopped using the barrier."""
        return any(other.is_alone for other in self._others.values())

    def complete(self, step: int, objects: Sequence[Capture], buffers: Sequence[torch.Tensor]) -> None:
        """Store this rank's own states at the end of `step`."""
        # Update the record last, because it announces to the other ranks that the states are stored.
        self._states.write(step, objects, buffers)
        now = time.monotonic()
        self.record.complete(step, 0.0 if self._completed_at is None else now - self._completed_at)
        self._completed_at = now

    def completed(self, rank: int) -> int:
        """Return the last step that `rank` has completed; -1 for none."""
        record = self.record if rank == self.rank else self._other(rank)
        return -1 if record is None else record.completed

    def lost_ranks(self) -> list[int]:
        """Return the ranks that ended before their training did, except ranks that left on purpose."""
        others = self._opened().items()
        return [rank for rank, other in others if not other.has_left and not is_running(other.pid)]

    def wait_for_step(self, step: int, seconds: float) -> None:
        """Wait until every running rank has completed `step`."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if all(other.completed >= step or not is_running(other.pid) for other in self._opened().values()):
                return
            time.sleep(_LOOK_S)

    def wait_for_end(self, seconds: float) -> list[int]:
        """Wait until every rank has finished its training or is gone; return the ranks that are gone."""
        deadline = time.monotonic() + seconds
        while not (gone := self.lost_ranks()) and time.monotonic() < deadline:
            if all(other.has_left for other in self._opened().values()):
                break
            time.sleep(_LOOK_S)
        return gone

    def _wait(self, step: int, waiting: list[int]) -> None:
        began = looked = time.monotonic()
        for turn in itertools.count():
            waiting = self._absent(step, waiting)
            if not waiting:
                return
            if turn < _SPINS:
                # With more ranks than cores, the absent rank may need this core.
                os.sched_yield()
                continue
            time.sleep(_SLEEP_S)
            now = time.monotonic()
            if now - looked < _LOOK_S:
                continue
            looked = now
            gone = [rank for rank in waiting if rank in self._others and not is_running(self._others[rank].pid)]
            if gone and self._absent(step, gone):  # a rank may have arrived just before it ended
                raise CommunicationError(
                    f"rank {self.rank}: {named_ranks(gone)} ended before optimizer step {step}, so no rank takes it; "
                    "look for the error of that rank"
                ).because_of(gone)
            if now - began > self._timeout:
                raise CommunicationError(
                    f"rank {self.rank}: {named_ranks(waiting)} did not reach optimizer step {step} within "
                    f"{self._timeout:g} s; {REMEDY}"
                ).because_of(waiting)

    def _absent(self, step: int, ranks: Sequence[int]) -> list[int]:
        return [rank for rank in ranks if rank != self.rank and self._prepared(rank) < step]

    def _prepared(self, rank: int) -> int:
        record = self._other(rank)
        if record is None:
            return -1
        # A rank that steps alone never returns to the barrier.
        return sys.maxsize if record.is_alone else record.prepared

    def _opened(self) -> dict[int, StepRecord]:
        """Return the records of the other ranks that have opened their Checkpointers."""
        others = {rank: self._other(rank) for rank in range(self.size) if rank != self.rank}
        return {rank: other for rank, other in others.items() if other is not None}

    def _other(self, rank: int) -> StepRecord | None:
        """Return the record of another rank, or None before it has opened its Checkpointer."""
        if rank not in self._others:
            try:
                self._others[rank] = StepRecord(record_path(self.folder, rank))
            except (OSError, ValueError):  # not yet written
                return None
        return self._others[rank]


def states_path(folder: Path, rank: int) -> Path:
    """Return the common prefix of the paths of `rank`'s state files."""
    return folder / f"rank-{rank}.states"


class OwnStatesFiles:
    """The files of one rank's states; their names begin with `path`. Existing files are replaced."""

    def __init__(self, path: Path) -> None:
        self._number = 0
        """Number of the last write."""
        self._files, self._memory = _of(path), list[mmap.mmap]()
        self._numpy: tuple[bytes, Any] | None = None
        """The latest state of NumPy's generator: its memory, and its stored form."""
        self._plain: tuple[tuple[Any, ...], bytes] = (), b""
        """The latest plain values and their bytes, reused because an optimizer step often leaves them unchanged."""
        try:
            for file in self._files:
                file.unlink(missing_ok=True)
                self._memory.append(_mapped(file, _RESERVED))
        except OSError:
            for file in self._files:
                file.unlink(missing_ok=True)  # others need the memory
            raise

    def write(self, step: int, objects: Sequence[Capture], buffers: Sequence[torch.Tensor]) -> None:
        """Store this rank's generators, `objects` and `buffers` as its states at `step`."""
        tensors = [_as_stored(tensor) for capture in objects for tensor in capture.tensors.values()]
        tensors += map(_as_stored, buffers)
        nodes = [(dict(capture.nodes), dict(capture.aliases), list(capture.tensors)) for capture in objects]
        layout = [(tuple(tensor.shape), str(tensor.dtype)) for tensor in tensors]
        values = self._generators(), nodes, layout
        if values != self._plain[0]:
            self._plain = values, marshal.dumps(values)
        plain = self._plain[1]
        self._number += 1
        index = self._number % _FILES
        total = _HEAD.size + len(plain) + sum(tensor.nbytes for tensor in tensors)
        if total > len(self._memory[index]):
            self._memory[index] = _mapped(self._files[index], total + _RESERVED)
        memory, end = self._memory[index], _HEAD.size + len(plain)
        memory[:8] = bytes(8)  # the states are invalid until the last line
        memory[_HEAD.size : end] = plain
        for tensor in tensors:
            for piece in bytes_of(tensor):
                memory[end : end + len(piece)] = piece
                end += len(piece)
        struct.pack_into("<qq", memory, 8, step, len(plain))
        struct.pack_into("<q", memory, 0, self._number)

    def _generators(self) -> tuple[Any, ...]:
        """Return the content of :func:`paceline.core.rng.rng_state` in a form that is fast to store."""
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


def read_own_states(path: Path, step: int, *, prepared: bool = False) -> OwnStates:
    """Return the latest states for `step` in a rank's files, or the first with `prepared`; empty if there are none."""
    contents = [file.read_bytes() for file in _of(path)]
    heads = [_HEAD.unpack_from(content) for content in contents]
    writes = [(number, index) for index, (number, at, _) in enumerate(heads) if number and at == step]
    if not writes:
        return {}
    _, index = (min if prepared else max)(writes)
    end = _HEAD.size + heads[index][2]
    generators, objects, layout = marshal.loads(contents[index][_HEAD.size : end])
    tensors = _tensors(layout, contents[index][end:])
    states: OwnStates = {("random generator", name): state for name, state in zip(_GENERATORS, generators, strict=True)}
    for nodes, aliases, names in objects:
        states["object", next(iter(nodes))] = nodes, aliases, {name: next(tensors) for name in names}
    return states | {("buffer", number): tensor for number, tensor in enumerate(tensors)}


def carry_over(rank: int, lost: OwnStates, before: OwnStates, after: OwnStates) -> OwnStates:
    """Return the states of the lost `rank` at the end of a step; raise a ValueError if one is unknown.

    A state that a survivor did not change between the barrier and the end of the step is taken to be unchanged on the
    lost rank. A state that was equal on both ranks at the barrier, such as an update counter, is taken to be equal at
    the end. Other states cannot be known: for example, random generators after the second forward of a GAN, or an
    optimizer with a state per rank, which is not stored at the barrier.

    Args:
        rank: the lost rank. Buffers are reconstructed only for rank 0, because no others are saved.
        lost: its states at the barrier.
        before: a survivor's states at the barrier.
        after: the survivor's states at the end of the step.
    """
    states = dict(lost)
    for (kind, name), at_end in after.items():
        key = kind, name
        if before.get(key) == at_end or (kind == "buffer" and rank != 0):
            continue
        if key not in before or lost.get(key) != before.get(key):
            raise ValueError(
                f"{kind} {name!r} of rank {rank} changed between the optimizer and the end of the step, and its new "
                "state is lost"
            )
        states[key] = at_end
    return states


def objects_in(states: OwnStates) -> Capture:
    """Return the states of the registered objects."""
    nodes, tensors, aliases = dict[str, Any](), dict[str, torch.Tensor](), dict[str, str]()
    for (kind, _), state in states.items():
        if kind == "object":
            nodes |= state[0]
            aliases |= state[1]
            tensors |= {name: _loaded(*content) for name, content in state[2].items()}
    return Capture(nodes, tensors, aliases)


def buffers_in(states: OwnStates) -> list[torch.Tensor]:
    """Return the buffers in their stored order."""
    return [_loaded(*state) for (kind, _), state in states.items() if kind == "buffer"]


def generators_in(states: OwnStates) -> dict[str, Any]:
    """Return the random generators, in the form of :func:`paceline.core.rng.rng_state`."""
    in_torch, in_python, in_numpy, in_cuda = (states["random generator", name] for name in _GENERATORS)
    if in_numpy is not None:
        import numpy  # was loaded when the state was taken

        kind, keys, *rest = in_numpy
        in_numpy = (kind, numpy.frombuffer(keys, dtype="uint32"), *rest)
    return rng_state_of(_bytes(in_torch), in_python, in_numpy, None if in_cuda is None else _bytes(in_cuda))


def _of(path: Path) -> list[Path]:
    return [path.with_name(f"{path.name}-{number}") for number in range(_FILES)]


def _mapped(file: Path, size: int) -> mmap.mmap:
    """Create or enlarge `file`, and return its memory."""
    with open(file, "a+b", opener=lambda name, flags: os.open(name, flags, 0o600)) as opened:
        os.posix_fallocate(opened.fileno(), 0, size)  # otherwise, a write into full memory causes a SIGBUS
        return mmap.mmap(opened.fileno(), size)


def _as_stored(tensor: torch.Tensor) -> torch.Tensor:
    """Return the result of :func:`stored`, fast for tensors that are already in this form."""
    is_stored = (
        tensor.is_contiguous() and tensor.device.type == "cpu" and not tensor.is_complex() and not tensor.is_neg()
    )
    return tensor if is_stored else stored(tensor)


def _tensors(layout: Sequence[tuple[tuple[int, ...], str]], content: bytes) -> Iterator[tuple[Spec, bytes]]:
    begin = 0
    for shape, dtype in layout:
        spec = Spec(shape, dtype.removeprefix("torch."))
        yield spec, content[begin : begin + spec.nbytes]
        begin += spec.nbytes


def _loaded(spec: Spec, content: bytes) -> torch.Tensor:
    return _bytes(content).view(getattr(torch, spec.dtype)).reshape(spec.shape) if content else spec.empty()


def _bytes(content: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)
