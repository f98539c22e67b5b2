"""Rank 0's end of a Checkpointer: the folder, what is in it, and the writer that adds to it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.checkpoint import ledger, restoring
from paceline.checkpoint.background import BackgroundWriter
from paceline.checkpoint.ledger import Ledger, Run
from paceline.checkpoint.manifest import Manifest
from paceline.checkpoint.notes import Keep
from paceline.checkpoint.recovery import Recovery
from paceline.checkpoint.saving import Writer
from paceline.checkpoint.storage import Storage
from paceline.checkpoint.verify import Damaged
from paceline.errors import CheckpointError, UsageError


class RunFolder:
    """A run's folder, opened. Its answers are about what is durable, also while a save is being written.

    Raises:
        UsageError: if an argument is malformed, or the folder cannot be used.
    """

    storage: Storage
    writer: Writer
    ledger: Ledger
    recovery: Recovery | None = None
    """Knows of a checkpoint that was rescued into memory."""

    def __init__(self, folder: Path, keep: Keep, async_save: bool) -> None:
        keep.check()
        if not isinstance(async_save, bool):
            raise UsageError(f"async_save must be True or False, not {async_save!r}")
        self._keep = keep
        self.storage = Storage(folder)
        self.ledger = Ledger()
        self._runs_before: tuple[Run, ...] = ()  # that led to the checkpoint chosen last
        self.writer = (BackgroundWriter if async_save else Writer)(self.storage, keep)

    def newest(self) -> str | None:
        """Return the path of the newest whole checkpoint; None if there is none."""
        with self.storage.settled:
            found = self._rescued(None) or self.storage.newest()
        return None if found is None else str(found[0])

    def steps(self) -> list[int]:
        """Return the steps that have a folder; also one rescued into memory."""
        with self.storage.settled:
            rescued = [] if self.recovery is None else self.recovery.rescued_step()
            return sorted({*self.storage.steps(), *rescued})

    def best(self) -> int | None:
        """Return the step of the best checkpoint; None if there is none, or nothing says what is best."""
        with self.storage.settled:
            return self._keep.best(self.storage.notes()) if self._keep.metric else None

    def metadata(self, step: int | None) -> Mapping[str, Any]:
        """Return the metadata of the checkpoint of `step`, or of the newest whole one.

        Raises:
            NoCheckpoint: if there is none, or they are damaged.
        """
        with self.storage.settled:
            if step is None:
                step = restoring.choose(self.storage, None)[1].step
            return restoring.read_notes(self.storage, step).metadata

    def choose(self, step: int | None) -> tuple[Path, Manifest]:
        """Return the checkpoint to restore: that of `step`, or the newest whole one, once nothing is being written.

        Raises:
            NoCheckpoint: if there is none, or that of `step` is damaged.
            CheckpointError: if its ledger is malformed, which its checksum does not rule out.
        """
        self.writer.join()
        path, found = self._rescued(step) or restoring.choose(self.storage, step)
        try:
            self._runs_before = ledger.read(path, found)
        except Damaged as damage:
            raise CheckpointError(f"the checkpoint {path} cannot be used: {damage}; use another one") from None
        return path, found

    def resumed(self, step: int) -> None:
        """Note in the ledger that the run goes on from the chosen checkpoint, that of `step`."""
        self.ledger.resume(self._runs_before, step, max([self.storage.begun, *self.storage.steps()]))

    def _rescued(self, step: int | None) -> tuple[Path, Manifest] | None:
        """Return the checkpoint in memory if it is the newest, or that of `step`, which is not on disk."""
        return None if self.recovery is None else self.recovery.rescued(step, self.storage.steps())

    def close(self) -> None:
        """Wait until nothing is being written, and release the folder for other runs."""
        try:
            self.writer.close()
        finally:
            self.storage.close()
