"""Writes saves in the background, from a copy, while training goes on.

    save()  ──► copy rank 0's states into the staging memory, fetch the other ranks' ──► returns
                                     └──► thread: write, fsync, rename, prune ──► finish() waits, and raises its error

The thread makes no collective and touches no live tensor. There is at most one, so there is at most one copy.

Decision 0030 says why.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

from paceline.checkpoint.captures import Capture
from paceline.checkpoint.format.metadata import Keep
from paceline.checkpoint.format.safetensors_file import spec_of
from paceline.checkpoint.saving.save import Part, Save
from paceline.checkpoint.saving.writer import Draft, Writer
from paceline.checkpoint.storage.free_space import aligned
from paceline.checkpoint.storage.step_folders import Storage
from paceline.core.telemetry.users_code import warn
from paceline.errors import CheckpointError, CheckpointWarning


class Staging:
    """Memory for one copy of rank 0's states, reused by every save so that its pages are already mapped."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._used = 0  # bytes, by the latest copies

    def copies(self, captures: Sequence[Capture]) -> list[Capture]:
        """Return copies of `captures` on the CPU in stored form, overwriting the previous copies."""
        tensors = [tensor for each in captures for tensor in each.tensors.values()]
        self._grow(
            sum(aligned(spec_of(tensor).nbytes) for tensor in tensors), any(tensor.is_cuda for tensor in tensors)
        )
        self._used = 0
        return [
            Capture(each.nodes, {name: self._copy(tensor) for name, tensor in each.tensors.items()}, each.aliases)
            for each in captures
        ]

    def _grow(self, size: int, pinned: bool) -> None:
        if size <= self._memory.numel():
            return
        self._memory = torch.empty(0, dtype=torch.uint8)  # released before the larger one is allocated
        try:
            self._memory = torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
        except RuntimeError as error:  # torch's error for lack of memory
            raise MemoryError(f"no memory for a copy of {size} bytes ({error})") from error

    def _copy(self, tensor: torch.Tensor) -> torch.Tensor:
        spec = spec_of(tensor)
        place = self._memory[self._used : self._used + spec.nbytes]
        self._used += aligned(spec.nbytes)
        if not spec.nbytes:
            return spec.empty()
        copy = place.view(getattr(torch, spec.dtype)).view(spec.shape)
        copy.copy_(torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor)
        return copy


class _Fate:
    """How the latest save ended; the thread writes it, the training reads it."""

    # An object of its own, because the writer's finalizer refers to it and must not keep the writer alive.

    def __init__(self) -> None:
        self.error: CheckpointError | None = None  # not raised yet

    def warn_if_unreported(self) -> None:
        """Warn of an error that was not raised, because the process or the Checkpointer ends."""
        if self.error is not None:
            warn(str(self.error), CheckpointWarning)


class BackgroundWriter(Writer):
    """Writes a save in a thread, from a copy: it is durable when :meth:`finish` has returned.

    The interpreter waits for the thread when it ends.
    """

    in_background = True

    def __init__(self, store: Storage, keep: Keep) -> None:
        super().__init__(store, keep)
        self._staging = Staging()
        self._thread: threading.Thread | None = None  # of the latest save, until it was joined
        self._fate = _Fate()
        weakref.finalize(self, self._fate.warn_if_unreported)

    def save(self, order: Save, states: Iterable[Part]) -> Path:
        """Copy `states`, and start writing them as the checkpoint that `order` describes."""
        assert self._thread is None, "finish() comes before the next save"
        with self._explained(order):
            draft = Draft(self._store, order)  # first, because it raises at once if the disk has no room
            try:
                copies = self._copied(list(states))
                thread = threading.Thread(target=self._run, args=(order, draft, copies), name="paceline-checkpoint")
                thread.start()
            except RuntimeError as error:  # no thread can be started
                draft.abandon()
                raise OSError(str(error)) from error
            except BaseException:
                draft.abandon()
                raise
        self._thread = thread
        return self._store.path(order.step)

    def failure(self) -> CheckpointError | None:
        """Return the error of the latest save as soon as it has failed, unless :meth:`finish` has raised it."""
        return self._fate.error

    def join(self) -> None:
        """Wait until nothing is being written."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def finish(self) -> None:
        """Wait until the latest save is durable."""
        self.join()
        error, self._fate.error = self._fate.error, None
        if error is not None:
            raise error

    def close(self) -> None:
        """Wait until nothing is being written, and release the memory; warn of an error that was not raised."""
        self.join()
        self._staging = Staging()
        self._fate.warn_if_unreported()
        self._fate.error = None

    def _copied(self, states: list[Part]) -> list[Part]:
        """Return `states` with copies of rank 0's states; those from other ranks already are copies."""
        mine = [part for part in states if not part[0]]
        copies = self._staging.copies([states for _, states in mine])
        return [(rank, copy) for (rank, _), copy in zip(mine, copies, strict=True)] + states[len(mine) :]

    def _run(self, order: Save, draft: Draft, states: list[Part]) -> None:
        try:
            self._write(order, draft, states)
        except BaseException as error:  # any error must reach the training
            self._fate.error = self._unsaved(order, error)
            self._fate.error.__cause__ = error
