"""The folder of a run, opened on rank 0."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from paceline.checkpoint.captures import Capture
from paceline.checkpoint.manifest import Manifest, Value, read_whole
from paceline.checkpoint.metadata import Keep, Notes
from paceline.checkpoint.saving import Save, Writer, parts
from paceline.checkpoint.step_folders import Storage, intact, newest, steps_in
from paceline.checkpoint.step_names import step_name
from paceline.core.missing_ranks import called_by_all
from paceline.core.spans import CHECKPOINT, recorder
from paceline.errors import CheckpointError, NoCheckpoint, UsageError


@contextmanager
def on_all_ranks(call: str) -> Iterator[None]:
    """Decorator for a call that every rank makes; a slow disk on rank 0 is then not reported as a hang."""
    with recorder.span(CHECKPOINT), called_by_all(call):
        yield


def validate_path(folder: Any) -> None:
    if not isinstance(folder, str | os.PathLike) or not os.fspath(folder):
        raise UsageError(f"the checkpoint folder must be a non-empty path, not {folder!r}; give the path of a folder")


def newest_rescued(folder: Path) -> tuple[Path, Manifest] | None:
    """Return the path and manifest of the newest intact checkpoint in a `folder` of rescued checkpoints, or None."""
    if not folder.is_dir():
        return None
    # Without warnings, because users cannot repair a checkpoint in memory.
    return newest(folder, set(steps_in(folder)), read_whole)


class RunFolder:
    """The opened folder of a run. Its methods see only durable checkpoints, even during a background save.

    Args:
        folder: the folder on disk.
        keep: the rule for checkpoints to keep.
        async_save: whether saves are written in the background.
        memory: the folder of rescued checkpoints, which may not exist; None without rescues.
        has_progress: see :class:`Storage`.
    """

    def __init__(self, folder: Path, keep: Keep, async_save: bool, memory: Path | None, has_progress: bool) -> None:
        keep.check()
        if not isinstance(async_save, bool):
            raise UsageError(f"async_save must be True or False, not {async_save!r}")
        self._keep, self._memory = keep, memory
        self._storage = Storage(folder, has_progress)
        self.writer = Writer(self._storage, keep, async_save)

    def save(self, order: Save, own_captures: Sequence[Capture]) -> Path:
        """Write the captures of all ranks."""
        with parts(order.world_size, own_captures) as states:
            return self.writer.save(order, states)

    def newest(self) -> str | None:
        """Return the path of the newest intact checkpoint, or None."""
        with self._storage.settled:
            newest_checkpoint = self._rescued(None) or self._storage.newest()
        return None if newest_checkpoint is None else str(newest_checkpoint[0])

    def steps(self) -> list[int]:
        """Return the steps that have a folder."""
        with self._storage.settled:
            return sorted({*self._steps_on_disk(), *self._rescued_steps()})

    def best(self) -> int | None:
        """Return the step of the best checkpoint, or None."""
        with self._storage.settled:
            return self._keep.best(self._storage.notes()) if self._keep.metric else None

    def metadata(self, step: int | None) -> Mapping[str, Any]:
        """Return the metadata of the checkpoint of `step`, or of the newest intact checkpoint."""
        with self._storage.settled:
            if self._rescued(step) is not None:  # a rescued checkpoint has no metadata
                return {}
            step = self._on_disk(None)[1].step if step is None else step
            return self._read(step, Notes.read_verified).metadata

    def choose(self, step: int | None) -> tuple[Path, Manifest]:
        """Return the checkpoint of `step`, or the newest intact checkpoint, after a background save has ended."""
        self.writer.join()
        return self._rescued(step) or self._on_disk(step)

    def settled(self) -> Storage:
        """Return the opened folder, after a background save has ended."""
        self.writer.join()
        return self._storage

    def _on_disk(self, step: int | None) -> tuple[Path, Manifest]:
        """Return the path and manifest of the checkpoint of `step`, or of the newest intact checkpoint."""
        store = self._storage
        if step is not None:
            return store.path(step), self._read(step, read_whole)
        if (stored := store.newest()) is not None:
            return stored
        damaged = ", ".join(step_name(step) for step in store.steps())
        if damaged:
            raise NoCheckpoint(
                f"no checkpoint in {store.folder} is intact (damaged: {damaged}); restore one from a copy, or start in "
                "another folder"
            )
        raise NoCheckpoint(f"there is no checkpoint in {store.folder}; check the path, or start without restore()")

    def _read(self, step: int, read: Callable[[Path, int], Value]) -> Value:
        store = self._storage
        if step not in (steps := store.steps()):
            raise NoCheckpoint(
                f"there is no checkpoint of step {step} in {store.folder}, which has {steps}; choose one of them"
            )
        return intact(store.path(step), step, read)

    def _rescued(self, step: int | None) -> tuple[Path, Manifest] | None:
        """Return the checkpoint in memory if it is the newest, or the only one of `step`; otherwise None."""
        rescued, on_disk = self._rescued_steps(), self._steps_on_disk()
        if not rescued or rescued[-1] in on_disk or step not in (None, rescued[-1]):
            return None
        if step is None and on_disk and rescued[-1] < on_disk[-1]:
            return None
        return newest_rescued(self._memory) if self._memory is not None else None

    def _rescued_steps(self) -> list[int]:
        return steps_in(self._memory) if self._memory is not None and self._memory.is_dir() else []

    def _steps_on_disk(self) -> list[int]:
        try:
            return self._storage.steps()
        except CheckpointError:
            if not self._rescued_steps():
                raise
            return []  # the folder is missing, but the step in memory is newer than any in it

    def close(self) -> None:
        """Wait for a background save, and release the folder for other runs."""
        self.writer.join()  # outside the try block, because the folder must stay locked after a Ctrl-C here
        try:
            self.writer.close()
        finally:
            self._storage.close()
