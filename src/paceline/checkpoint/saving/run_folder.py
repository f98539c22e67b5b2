"""The folder of a run: as all ranks share it, and as rank 0 has it open."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from paceline.checkpoint import captures
from paceline.checkpoint.captures import Capture
from paceline.checkpoint.format import metadata
from paceline.checkpoint.format.manifest import Manifest
from paceline.checkpoint.format.metadata import Keep, Notes
from paceline.checkpoint.format.verify import Damaged, read_whole
from paceline.checkpoint.objects.registered import Registered
from paceline.checkpoint.saving.asynchronous import BackgroundWriter
from paceline.checkpoint.saving.save import Save, capture_all, parts
from paceline.checkpoint.saving.writer import Writer
from paceline.checkpoint.step_names import step_name
from paceline.checkpoint.storage.step_folders import Storage, steps_in
from paceline.core.processes import consensus
from paceline.core.processes.missing_ranks import called_by_all
from paceline.core.processes.world import World
from paceline.core.telemetry.spans import CHECKPOINT, recorder
from paceline.errors import CheckpointError, NoCheckpoint, UsageError

Found = TypeVar("Found")


@contextmanager
def on_all_ranks(call: str) -> Iterator[None]:
    """Mark `call`, which every rank makes; in it rank 0 may spend long on its disk, which is not a hang."""
    with recorder.span(CHECKPOINT), called_by_all(call):
        yield


def validate_path(folder: Any) -> None:
    """Check that `folder` is a path."""
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


class SharedFolder:
    """The folder `path` of a run, which every rank names and rank 0 opens. `keep` decides which checkpoints stay.

    Rank 0 answers for it, and an error on any rank is raised on all.
    """

    def __init__(self, path: Path, keep: Keep) -> None:
        self.path = path
        self.keep = keep
        self.opened: RunFolder | None = None  # rank 0's
        self.is_closed = False
        self.in_flight = False  # the same on all ranks: a background save was started and not waited for
        self._saves_in_background = False

    def open(self, world: World, async_save: bool, memory: Path | None, goes_on: bool) -> None:
        """Open the folder on rank 0, including the checkpoints rescued into `memory`."""

        def open_here() -> bool:
            self.opened = RunFolder(self.path, self.keep, async_save, memory, goes_on)
            return self.opened.writer.in_background

        # Rank 0's answer counts, because ranks that wait for different things would wait for ever.
        self._saves_in_background = bool(consensus.decide(world, open_here))

    def world(self) -> World:
        """Return the ranks."""
        if self.is_closed:
            raise UsageError(f"the Checkpointer of {self.path} is closed; make a new one")
        return consensus.here()

    def ask(self, question: Callable[[RunFolder], Any]) -> Any:
        """Return the answer of rank 0's folder to `question`, a JSON value, on every rank."""
        return consensus.decide(self.world(), lambda: question(self.rank_0s))

    def save(self, world: World, step: int, entries: Sequence[Registered], note: Callable[[], Notes]) -> Path:
        """Save `entries` as the checkpoint of `step`; it is durable unless it is :attr:`in_flight` afterwards."""
        order, found = capture_all(world, step, entries, note)
        if world.rank != 0:
            captures.hand_over(found[-1])
        path = consensus.decide(world, lambda: str(self.rank_0s.save(order, found)))
        self.in_flight = self._saves_in_background
        return Path(path)

    def finish(self, world: World) -> bool:
        """Wait on every rank for the background save, and raise its error there; return whether there was one."""
        in_flight, self.in_flight = self.in_flight, False
        if in_flight:
            try:
                consensus.decide(world, lambda: self.rank_0s.writer.finish())
            except KeyboardInterrupt:
                self.in_flight = True  # the next call waits for it
                raise
        return in_flight

    def release(self) -> None:
        """Release the folder for other runs."""
        if self.opened is not None:
            self.opened.close()
        self.opened = None

    @property
    def rank_0s(self) -> RunFolder:
        """The open folder, on rank 0."""
        assert self.opened is not None, "only rank 0 uses the folder"
        return self.opened


class RunFolder:
    """A run's folder, opened. Its methods report only durable checkpoints, also while a save is being written.

    Args:
        folder: the folder on disk.
        keep: the rule for checkpoints to keep.
        async_save: whether saves are written in the background.
        memory: the folder of rescued checkpoints, which need not exist; None if nothing is rescued.
        goes_on: see :class:`Storage`.
    """

    writer: Writer

    def __init__(self, folder: Path, keep: Keep, async_save: bool, memory: Path | None, goes_on: bool) -> None:
        keep.check()
        if not isinstance(async_save, bool):
            raise UsageError(f"async_save must be True or False, not {async_save!r}")
        self._keep, self._memory = keep, memory
        self._storage = Storage(folder, goes_on)
        self.writer = (BackgroundWriter if async_save else Writer)(self._storage, keep)

    def save(self, order: Save, found: Sequence[Capture]) -> Path:
        """Write the captures that rank 0 has `found`, and those that the other ranks send."""
        with parts(order.world_size, found) as states:
            return self.writer.save(order, states)

    def newest(self) -> str | None:
        """Return the path of the newest whole checkpoint; None if there is none."""
        with self._storage.settled:
            found = self._rescued(None) or self._storage.newest()
        return None if found is None else str(found[0])

    def steps(self) -> list[int]:
        """Return the steps that have a folder."""
        with self._storage.settled:
            return sorted({*self._steps_on_disk(), *self._rescued_steps()})

    def best(self) -> int | None:
        """Return the step of the best checkpoint; None if there is none, or no metric is set."""
        with self._storage.settled:
            return self._keep.best(self._storage.notes()) if self._keep.metric else None

    def metadata(self, step: int | None) -> Mapping[str, Any]:
        """Return the metadata of the checkpoint of `step`, or of the newest whole one."""
        with self._storage.settled:
            if self._rescued(step) is not None:  # a rescue has no metadata: they come from the script
                return {}
            step = self._on_disk(None)[1].step if step is None else step
            return self._read(step, metadata.read_verified).metadata

    def choose(self, step: int | None) -> tuple[Path, Manifest]:
        """Return the checkpoint to restore: that of `step`, or the newest whole one, once nothing is being written."""
        self.writer.join()
        return self._rescued(step) or self._on_disk(step)

    def settled(self) -> Storage:
        """Return the opened folder, once nothing is being written."""
        self.writer.join()
        return self._storage

    def _on_disk(self, step: int | None) -> tuple[Path, Manifest]:
        """Return path and manifest of the checkpoint of `step`, or of the newest whole one."""
        store = self._storage
        if step is not None:
            return store.path(step), self._read(step, read_whole)
        if (newest := store.newest()) is not None:
            return newest
        damaged = ", ".join(step_name(step) for step in store.steps())
        if damaged:
            raise NoCheckpoint(
                f"no checkpoint in {store.folder} is whole (damaged: {damaged}); bring one back from a "
                "copy, or start anew in another folder"
            )
        raise NoCheckpoint(
            f"there is no checkpoint in {store.folder} to resume from; check the path, or start without resuming"
        )

    def _read(self, step: int, read: Callable[[Path, int], Found]) -> Found:
        store = self._storage
        if step not in (steps := store.steps()):
            raise NoCheckpoint(
                f"there is no checkpoint of step {step} in {store.folder}, which has {steps}; choose one of them"
            )
        try:
            return read(store.path(step), step)
        except Damaged as damage:
            raise NoCheckpoint(
                f"the checkpoint {store.path(step)} is damaged: {damage}; choose another step, or none for the newest "
                "that is whole"
            ) from None

    def _rescued(self, step: int | None) -> tuple[Path, Manifest] | None:
        """Return the checkpoint in memory if it is the newest of all, or the only one of `step`; otherwise None."""
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
            if not self._rescued_steps():  # or the run would begin anew in silence
                raise
            return []  # the folder is gone, but the step in memory is later than any in it

    def close(self) -> None:
        """Wait until nothing is being written, and release the folder for other runs."""
        try:
            self.writer.close()
        except KeyboardInterrupt:  # a save may still be writing, so other runs must not use the folder yet
            raise
        # The latest save has failed, but it has ended: the next run may have the folder.
        except BaseException:
            self._storage.close()
            raise
        self._storage.close()
