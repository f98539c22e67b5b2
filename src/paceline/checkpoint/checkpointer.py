"""The Checkpointer: saves the objects registered with it, and restores them, on any number of ranks.

Rank 0 writes, verifies and reads. The other ranks send it their states and receive what they need, so only rank 0's
host needs the folder. Every decision is rank 0's, and an error on any rank is an error on every rank.
"""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Mapping
from contextlib import AbstractContextManager
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, TypeVar

from paceline.checkpoint.exchange import collected_states
from paceline.checkpoint.exchange.saved_checkpoint import Saved, compare, validate_registrable
from paceline.checkpoint.format import metadata as notes
from paceline.checkpoint.format.metadata import Keep
from paceline.checkpoint.format.state_codec import Encoder
from paceline.checkpoint.loading import restore as restoring
from paceline.checkpoint.objects.protocols import Stateful
from paceline.checkpoint.objects.registered import Registered
from paceline.checkpoint.recovery.emergency_save import Contents
from paceline.checkpoint.recovery.interrupts import uninterrupted
from paceline.checkpoint.recovery.recovery import History, Recovery
from paceline.checkpoint.saving.checkpoint_store import RunFolder, validate_path
from paceline.checkpoint.saving.due_saves import DueSaves
from paceline.checkpoint.saving.save_interval import SaveInterval
from paceline.checkpoint.saving.saved_steps import SavedSteps
from paceline.checkpoint.saving.synchronous import collect
from paceline.core.processes import consensus
from paceline.core.processes.missing_ranks import called_by_all
from paceline.core.processes.world import World
from paceline.core.telemetry.spans import CHECKPOINT, recorder
from paceline.core.torch_internals.distributed.dtensor import local_of
from paceline.errors import CheckpointError, UsageError

Object = TypeVar("Object", bound=Stateful)


class Checkpointer(SavedSteps, AbstractContextManager["Checkpointer"]):
    """Saves and restores registered objects as folders ``step-00000120`` in `folder`.

    Make it on all ranks, with the same arguments, and call its methods on all ranks (except :meth:`register`).
    Without a process group this process is the only rank. ::

        checkpointer = Checkpointer("runs/7")
        checkpointer.register("model", model)
        checkpointer.register("optimizer", optimizer)
        step = checkpointer.restore() if checkpointer.steps() else 0
        ...
            optimizer.step()
            step = checkpointer.step()

    The random generators of every rank are always saved, without being registered.

    Args:
        folder: where the checkpoints are; made if it is not there, for this user alone (mode 0700, its files 0600,
            less what the umask takes away). One run at a time uses it. Other files in it are left alone.
        keep: how many of the newest checkpoints stay; at least 1.
        keep_best: the name of a number in the metadata that :meth:`save` is given. The checkpoint in which it is
            best stays, too, however old it is.
        best: whether the best number is the largest or the smallest.
        every: how often :meth:`step` saves: after so many steps, or so much time. By default it does not.
        async_save: whether :meth:`save` returns once rank 0 has a copy of everything, which a thread then writes
            while training goes on. Rank 0's host needs memory for that copy, and for what other ranks own. One save is
            written at a time. What goes wrong is raised by the next :meth:`save`, :meth:`wait` or :meth:`close`.

    Raises:
        UsageError: on every rank, if `keep` is below 1, another argument is malformed, or the folder cannot be made
            or written to, or is in use by another run.
    """

    @called_by_all("Checkpointer(…)")
    def __init__(
        self,
        folder: str | os.PathLike[str],
        keep: int = 3,
        keep_best: str | None = None,
        best: Literal["max", "min"] = "max",
        every: int | timedelta | None = None,
        async_save: bool = False,
    ) -> None:
        world = consensus.here()
        self._schedule = SaveInterval(every)
        consensus.agree(world, consensus.error_of(validate_path, folder) or consensus.error_of(self._schedule.check))
        self._folder = Path(folder).absolute()
        self._keep = Keep(keep, keep_best, best)
        self._registered: dict[str, Registered] = {}
        self._closed = False
        self._in_flight = False  # on all ranks alike: a save was started in the background, and not waited for
        me = weakref.ref(self)  # no cycle: a Checkpointer that is dropped leaves its folder at once
        contents = Contents(self._folder, self._registered, lambda: getattr(me(), "_opened", None))
        self._recovery = Recovery.of_all(world, contents)
        weakref.finalize(self, self._recovery.stops.close).atexit = False  # signals are not noted for nobody
        self.due = DueSaves(self._recovery.record, world.rank == 0)
        self._async_save = bool(consensus.decide(world, lambda: self._open(async_save)))  # rank 0's word

    def register(self, name: str, object: Object, per_rank: bool = False) -> Object:
        """Register `object`, to be saved and restored as `name`; return it.

        A module is saved as the module inside its data-parallel wrappers, so that keys carry no ``module.``
        prefix, together with the wrapper's bucket layout where it has one.

        Args:
            name: unique; lower-case letters, digits and underscores.
            object: anything with ``state_dict`` and ``load_state_dict``. Its state consists of tensors,
                ``None``, booleans, numbers, strings, bytes, lists, tuples and dicts. With a method
                ``check_state_dict`` it can refuse a state before anything is loaded.
            per_rank: whether each rank has a state of its own. If not, rank 0's is saved for all.

        Raises:
            UsageError: if the name is taken or malformed, or the object's state cannot be encoded; then the
                message names the path to the value.
        """
        validate_registrable(name, object, self._registered)
        entry = Registered.of(name, object, per_rank, self._registered)
        entry.capture(Encoder(None if per_rank else local_of))
        self._registered[name] = entry
        self._recovery.boundary.watch(entry)
        return object

    def step(self, metadata: Mapping[str, Any] | None = None) -> int:
        """Mark the end of a training step, at which everything registered is consistent; return the steps done.

        Call it on all ranks, after the optimizer and the scheduler, before collectives of your own. A turn in which no
        registered optimizer has stepped, because gradients accumulate, belongs to the next step.

        Under ``paceline run``, on one host and on the CPU, no step that ended here is lost when a rank ends: the others
        save the last one into memory, and the next start restores it. For that, optimizers wait in ``step()`` until all
        ranks have their gradients. Otherwise a run goes on from the newest checkpoint on disk.

        From the first call on, SIGTERM, SIGUSR1, SIGHUP and SIGINT to any rank end the training after a step that all
        ranks agree on, which is saved, unless the script handles these signals itself. A second one ends the process
        at once.

        Args:
            metadata: as in :meth:`save`, if this step is saved.

        Raises:
            CommunicationError: if a rank has ended.
            CheckpointError: if the step after which a signal ends the training could not be saved. A save that is due
                and fails is not raised: rank 0 warns, once for each cause, and the next one tries again.
            Preempted: on every rank, after such a signal, when the step is durable; a ``SystemExit``.
        """
        if self._closed:
            self._world()
        boundary, stops = self._recovery.boundary, self._recovery.stops
        stops.watch()
        if self._recovery.mark():
            stop, is_due = stops.agreed(), self._schedule.is_due(boundary.step)
            if stop is not None:
                self.save(boundary.step, metadata)
                self.wait()
                stops.end(stop)
            if is_due:
                self.due.save(self, boundary.step, metadata)
        return boundary.step

    @property
    def history(self) -> History:
        """Restarts of this run, and steps that were computed again."""
        return self._recovery.history()

    @uninterrupted()
    @called_by_all("Checkpointer.save()")
    def save(self, step: int, metadata: Mapping[str, Any] | None = None, protect: bool = False) -> Path:
        """Save every registered object as the checkpoint of `step`; it is durable when this returns.

        With ``async_save`` it is durable once :meth:`wait`, or the next :meth:`save`, has returned.

        If `step` is there already it is replaced: the old one goes only once the new one is complete. Then all but the
        newest ``keep`` up to `step`, the protected and the best one are deleted. The path is that on rank 0's host.

        Args:
            step: number of optimizer steps done; the same on every rank.
            metadata: whatever is worth knowing about it, such as ``{"best_acc1": 71.2}``, for :meth:`metadata`;
                numbers, strings, lists and dicts. Rank 0's is saved.
            protect: whether it stays until someone deletes it by hand.

        Raises:
            CheckpointError: on every rank, if it could not be written. Nothing is deleted, and it can be tried again.
                With ``async_save``, also if the save before was not written; then this one was not begun.
            UsageError: if `step` is no whole number from 0 on, the ranks have registered different objects, a
                registered wrapper is in the middle of an accumulation window, or what `keep_best` names is no number.
            DesyncError: if `step` differs between ranks.
        """
        with recorder.span(CHECKPOINT):
            return self._save(step, metadata, protect)

    def _save(self, step: int, metadata: Mapping[str, Any] | None, protect: bool) -> Path:
        world = self._world()
        self._finish(world)
        entries = list(self._registered.values())
        captures, checked_notes = collect(world, step, entries, lambda: self._keep.note(notes.check(metadata, protect)))
        size = collected_states.check_equal(world, step, entries, captures)
        if world.rank != 0:
            collected_states.hand_over(captures[-1])
        order = (world, step, size, checked_notes, captures)
        path = consensus.decide(world, lambda: str(self._run_folder.save(*order)))
        self._in_flight = self._async_save
        if not self._in_flight:
            self.due.written()
        return Path(path)

    @uninterrupted()
    @called_by_all("Checkpointer.wait()")
    def wait(self) -> None:
        """Wait until the save in the background, if there is one, is durable.

        Raises:
            CheckpointError: on every rank, if it was not written; once.
        """
        self._finish(self._world())

    @property
    def failure(self) -> CheckpointError | None:
        """The error of the save in the background, on rank 0, as soon as it has failed; raised on all ranks later."""
        return None if self._opened is None else self._opened.writer.failure()

    @uninterrupted()
    @called_by_all("Checkpointer.restore()")
    def restore(self, step: int | None = None, allow_changed_settings: bool = False) -> int:
        """Load the newest whole checkpoint, or that of `step`, into the registered objects; return its step.

        Checkpoints later than `step` stay, and a resume without `step` continues from them. So save a run that branches
        off into a folder of its own.

        Everything is compared before anything is loaded. If an object still refuses its state, every registered object
        gets back its earlier state, on every rank.

        The objects' own ``load_state_dict`` gets states on the CPU; modules and optimizers move them to their
        parameters' devices. The random generators are restored exactly if the number of ranks is the same as when it
        was saved; otherwise they stay as they are, and rank 0 says so.

        Optimizers are compared by class, groups, parameters' names and shapes, and the settings that they had when
        they were registered; register them before training.

        Args:
            step: None for the newest that is whole. One that was chosen and is damaged is an error.
            allow_changed_settings: whether settings of optimizers (learning rate, momentum, weight decay, …) may
                differ from the checkpoint's; then this run's are taken over, and rank 0 warns of each. The state comes
                from the checkpoint all the same.

        Raises:
            NoCheckpoint: on every rank, if there is no checkpoint, or none that is whole.
            CheckpointMismatch: if it does not fit what is registered; names what differs first.
            CheckpointError: if it cannot be read.
            UsageError: as an object's ``load_state_dict`` raises it.
        """
        world = self._world()
        restoring.check_same_step(world, step)
        saved = Saved.open(world, lambda: self._run_folder.choose(step))
        entries = list(self._registered.values())
        consensus.agree(world, consensus.error_of(compare, entries, saved, world, allow_changed_settings))
        restoring.restore(world, saved, entries, allow_changed_settings)
        self._recovery.go_on_from(saved.step, "memory" if saved.path.parent == self._recovery.memory else "disk")
        return saved.step

    @uninterrupted()
    def close(self) -> None:
        """Release the folder for other runs, at the end of training. Harmless when already closed.

        A save in the background is waited for, on all ranks; so call it on all of them then. While an exception is
        handled, which other ranks may not have, only rank 0 waits, and warns if the save failed.

        Raises:
            CheckpointError: on every rank, if the save in the background was not written, or none of those that
                ``every`` asked for was.
        """
        failing, was_open = sys.exc_info()[0] is not None, not self._closed
        try:
            if was_open and not failing:
                self._finish(consensus.here())
        finally:
            self._closed = True
            self._recovery.close(failing)
            if self._opened is not None:
                self._opened.close()
            self._opened = None
        if was_open and not failing and self._schedule.is_set:
            self.due.check_some(self._folder)

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: object) -> None:
        self.close()

    def _finish(self, world: World) -> None:
        """Wait on every rank for the save in the background, if there is one, and raise its error there."""
        in_flight, self._in_flight = self._in_flight, False
        if in_flight:
            try:
                consensus.decide(world, lambda: self._run_folder.writer.finish())
            except KeyboardInterrupt:
                self._in_flight = True  # the next call waits for it
                raise
            self.due.written()

    def _open(self, async_save: bool) -> bool:
        self._opened = RunFolder(self._folder, self._keep, async_save, self._recovery.memory)
        return self._opened.writer.in_background

    def _world(self) -> World:
        if self._closed:
            raise UsageError(f"the Checkpointer of {self._folder} is closed; make a new one")
        return consensus.here()
