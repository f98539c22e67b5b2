"""Rank 0's side of a Checkpointer: the folder, its contents, and the writer that adds to it."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.checkpoint.exchange.collected_states import Capture
from paceline.checkpoint.format.manifest import Manifest
from paceline.checkpoint.format.metadata import Keep, Notes
from paceline.checkpoint.format.verify import Damaged, read_whole
from paceline.checkpoint.loading import restore as restoring
from paceline.checkpoint.saving.asynchronous import BackgroundWriter
from paceline.checkpoint.saving.synchronous import Save, Writer, parts
from paceline.checkpoint.storage.step_folders import Storage, steps_in
from paceline.core.processes.world import World
from paceline.core.telemetry.step_progress import step_name
from paceline.errors import UsageError


def validate_path(folder: Any) -> None:
    """Check that `folder` is a path.

    Raises:
        UsageError: if it is not a path, or is empty.
    """
    if not isinstance(folder, str | os.PathLike) or not os.fspath(folder):
        raise UsageError(f"the checkpoint folder must be a path that is not empty, not {folder!r}; name a folder")


def newest_rescued(folder: Path) -> tuple[Path, Manifest] | None:
    """Return path and manifest of the newest whole checkpoint in the rescued `folder`; None if there is none."""
    if not folder.is_dir():
        return None
    for step in reversed(steps_in(folder)):
        try:
            return folder / step_name(step), read_whole(folder / step_name(step), step)
        except Damaged:  # never repaired in memory: use an older one, or the one on disk
            continue
    return None


class RunFolder:
    """A run's folder, opened. Its methods report only durable checkpoints, also while a save is being written.

    Args:
        folder: the folder on disk.
        keep: the rule for checkpoints to keep.
        async_save: whether saves are written in the background.
        memory: the folder of rescued checkpoints, which need not exist; None if nothing is rescued.

    Raises:
        UsageError: if an argument is malformed, or the folder cannot be used.
    """

    writer: Writer

    def __init__(self, folder: Path, keep: Keep, async_save: bool, memory: Path | None) -> None:
        keep.check()
        if not isinstance(async_save, bool):
            raise UsageError(f"async_save must be True or False, not {async_save!r}")
        self._keep, self._memory = keep, memory
        self._storage = Storage(folder)
        self.writer = (BackgroundWriter if async_save else Writer)(self._storage, keep)

    def save(self, world: World, step: int, size: int, checked_notes: Notes, captures: Sequence[Capture]) -> Path:
        """Write the `captures` of rank 0 and those that the other ranks send, `size` bytes in total.

        Raises:
            CheckpointError: if they cannot be written.
        """
        with parts(world, captures) as states:
            return self.writer.save(Save(step, world.size, size, checked_notes), states)

    def newest(self) -> str | None:
        """Return the path of the newest whole checkpoint; None if there is none."""
        with self._storage.settled:
            found = self._rescued(None) or self._storage.newest()
        return None if found is None else str(found[0])

    def steps(self) -> list[int]:
        """Return the steps that have a folder."""
        with self._storage.settled:
            return sorted({*self._storage.steps(), *self._rescued_steps()})

    def best(self) -> int | None:
        """Return the step of the best checkpoint; None if there is none, or no metric is set."""
        with self._storage.settled:
            return self._keep.best(self._storage.notes()) if self._keep.metric else None

    def metadata(self, step: int | None) -> Mapping[str, Any]:
        """Return the metadata of the checkpoint of `step`, or of the newest whole one.

        Raises:
            NoCheckpoint: if there is none, or they are damaged.
        """
        with self._storage.settled:
            if self._rescued(step) is not None:
                return {}
            if step is None:
                step = restoring.choose(self._storage, None)[1].step
            return restoring.read_notes(self._storage, step).metadata

    def choose(self, step: int | None) -> tuple[Path, Manifest]:
        """Return the checkpoint to restore: that of `step`, or the newest whole one, once nothing is being written.

        Raises:
            NoCheckpoint: if there is none, or that of `step` is damaged.
        """
        self.writer.join()
        return self._rescued(step) or restoring.choose(self._storage, step)

    def settled(self) -> Storage:
        """Return the opened folder, once nothing is being written."""
        self.writer.join()
        return self._storage

    def _rescued(self, step: int | None) -> tuple[Path, Manifest] | None:
        """Return the checkpoint in memory if it is the newest of all, or the only one of `step`; otherwise None."""
        rescued, on_disk = self._rescued_steps(), self._storage.steps()
        if not rescued or rescued[-1] in on_disk or step not in (None, rescued[-1]):
            return None
        if step is None and on_disk and rescued[-1] < on_disk[-1]:
            return None
        return newest_rescued(self._memory) if self._memory is not None else None

    def _rescued_steps(self) -> list[int]:
        return steps_in(self._memory) if self._memory is not None and self._memory.is_dir() else []

    def close(self) -> None:
        """Wait until nothing is being written, and release the folder for other runs."""
        try:
            self.writer.close()
        except KeyboardInterrupt:  # a save may still be writing, so other runs must not use the folder yet
            raise
        except BaseException:
            self._storage.close()
            raise
        self._storage.close()
