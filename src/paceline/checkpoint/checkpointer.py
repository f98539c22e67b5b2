"""The Checkpointer: saves the objects registered with it, and restores them, on any number of ranks.

Rank 0 writes, verifies and reads. The other ranks send it their states and receive their part, so only rank 0's
host needs the folder. Rank 0 makes every decision, and an error on any rank is raised on every rank.
"""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

from paceline.checkpoint import captures
from paceline.checkpoint.format import metadata as notes
from paceline.checkpoint.format import state_codec
from paceline.checkpoint.format.metadata import Keep
from paceline.checkpoint.format.state_codec import Encoder
from paceline.checkpoint.loading.restore import restore
from paceline.checkpoint.objects.protocols import Stateful
from paceline.checkpoint.objects.registered import Registered
from paceline.checkpoint.recovery.emergency_save import Contents
from paceline.checkpoint.recovery.interrupts import uninterrupted
from paceline.checkpoint.recovery.recovery import History, Recovery
from paceline.checkpoint.saving.due_saves import DueSaves, SaveInterval
from paceline.checkpoint.saving.run_folder import RunFolder, on_all_ranks, validate_path
from paceline.checkpoint.saving.save import capture_all
from paceline.core.processes import consensus
from paceline.core.processes.world import World
from paceline.core.telemetry.spans import CHECKPOINT, recorder
from paceline.core.torch_internals.distributed.dtensor import local_of
from paceline.errors import CheckpointError, UsageError

Object = TypeVar("Object", bound=Stateful)


class Checkpointer(AbstractContextManager["Checkpointer"]):
    """Saves and restores registered objects as folders ``step-00000120`` in `folder`.

    Create it on all ranks with the same arguments, and call its methods on all ranks (except :meth:`register`).
    Without a process group this process is the only rank. ::

        checkpointer = Checkpointer("runs/7")
        checkpointer.register("model", model)
        checkpointer.register("optimizer", optimizer)
        step = checkpointer.restore() if checkpointer.steps() else 0
        ...
            optimizer.step()
            step = checkpointer.step()

    The random generators of every rank are always saved and need not be registered.

    Args:
        folder: the checkpoint folder. If it does not exist, it is created for this user only (mode 0700, files 0600,
            minus the umask). One run at a time can use it. Other files in it are left alone.
        keep: the number of newest checkpoints to keep; at least 1.
        keep_best: the name of a number in the metadata passed to :meth:`save`. The checkpoint with the best value is
            also kept, however old it is.
        best: whether the best number is the largest or the smallest; by default the smallest for a name that ends in
            "loss", else the largest.
        every: how often :meth:`step` saves, as a number of steps or a time. By default it does not save.
        async_save: whether :meth:`save` returns once rank 0 has a copy of everything, which a thread then writes
            while training goes on. Rank 0's host needs memory for that copy and for the other ranks' own states. One
            save is written at a time. The next :meth:`save`, :meth:`wait` or :meth:`close` raises its errors.

    Raises:
        UsageError: on every rank, if `keep` is below 1, another argument is malformed, or the folder cannot be made
            or written to, or is in use by another run. When the launcher has restarted a job that had completed steps,
            a folder that cannot be written to is a warning, as for a save that fails.
    """

    @on_all_ranks("Checkpointer(…)")
    def __init__(
        self,
        folder: str | os.PathLike[str],
        keep: int = 3,
        keep_best: str | None = None,
        best: Literal["max", "min"] | None = None,
        every: int | timedelta | None = None,
        async_save: bool = False,
    ) -> None:
        world = consensus.here()
        self.every, self._schedule = every, SaveInterval(every)
        consensus.agree(world, consensus.error_of(validate_path, folder) or consensus.error_of(self._schedule.check))
        better = best or ("min" if str(keep_best).endswith("loss") else "max")
        self.keep_best = None if keep_best is None else (keep_best, better)
        self._path, self._keep = Path(folder).absolute(), Keep(keep, keep_best, better)
        self._opened: RunFolder | None = None  # on rank 0
        self._is_closed = False
        self._in_flight = False  # the same on all ranks: a background save was started and not waited for
        self._registered: dict[str, Registered] = {}
        this = weakref.ref(self)  # a Checkpointer that is dropped leaves its folder at once
        contents = Contents(self._path, self._registered, lambda: getattr(this(), "_opened", None))
        # Before the folder is opened, because its steps include those rescued into memory.
        self._recovery = Recovery.of_all(world, contents)
        weakref.finalize(self, self._recovery.stops.close).atexit = False  # stop noting signals that nothing would read
        self.due = DueSaves(self._recovery.record, world.rank == 0)
        # Last, because it takes the folder's lock, which an error above would have to release.
        # Rank 0's async_save counts, because ranks that wait for different things would wait for ever.
        self._saves_in_background = bool(consensus.decide(world, lambda: self._open(async_save)))

    def _open(self, async_save: bool) -> bool:
        recovery = self._recovery
        self._opened = RunFolder(self._path, self._keep, async_save, recovery.memory, recovery.goes_on)
        return async_save

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
        entry = Registered.of(name, object, per_rank, self._registered)
        entry.capture(Encoder(None if per_rank else local_of))
        self._registered[name] = entry
        self._recovery.watch(entry)
        return object

    def step(self, metadata: Mapping[str, Any] | None = None) -> int:
        """Mark the end of a training step, at which everything registered is consistent; return the steps done.

        Call it on all ranks, after the optimizer and the scheduler, and before your own collectives. While gradients
        accumulate, no step ends.

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
        if self.mark_step(metadata):
            self.due.save(self, self._recovery.boundary.step, metadata)
        return self._recovery.boundary.step

    def mark_step(
        self,
        metadata: Mapping[str, Any] | None = None,
        saving: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> bool:
        """Do as :meth:`step` does, but leave the save to the caller; return whether it is due.

        The save after which a signal ends the training happens here, in the context `saving`.
        """
        if self._is_closed:  # _world() raises then; it costs too much to call it in every step
            self._world()
        boundary, stops = self._recovery.boundary, self._recovery.stops
        stops.watch()
        if not self._recovery.mark():
            return False
        # Both are asked after every step, because each may be a collective.
        stop, is_due = stops.agreed(), self._schedule.is_due(boundary.step)
        if stop is not None:
            with saving():
                self.save(boundary.step, metadata)
                self.wait()
            stops.end(stop)
        return is_due

    @property
    def history(self) -> History:
        """Restarts of this run, and steps that were computed again."""
        return self._recovery.history()

    @uninterrupted()
    @on_all_ranks("Checkpointer.save()")
    def save(self, step: int, metadata: Mapping[str, Any] | None = None, protect: bool = False) -> Path:
        """Save every registered object as the checkpoint of `step`; it is durable when this returns.

        With ``async_save`` it is durable once :meth:`wait`, or the next :meth:`save`, has returned.

        If `step` is there already it is replaced: the old one goes only once the new one is complete. Then all but the
        newest ``keep`` up to `step`, the protected and the best one are deleted. The path is that on rank 0's host.

        Args:
            step: number of optimizer steps done; the same on every rank.
            metadata: information about the checkpoint that :meth:`metadata` returns, such as ``{"best_acc1": 71.2}``:
                numbers, strings, lists and dicts. Rank 0's metadata is saved.
            protect: whether to keep it until it is deleted by hand.

        Raises:
            CheckpointError: on every rank, if it could not be written. Nothing is deleted, and it can be tried again.
                With ``async_save``, also if the save before was not written; then this one was not begun.
            UsageError: if `step` is not a whole number from 0 on, the ranks have registered different objects, a
                registered wrapper is in the middle of an accumulation window, or the `keep_best` value is not a number.
            DesyncError: if `step` differs between ranks.
        """
        world, entries = self._world(), list(self._registered.values())
        self._finish(world)  # there is memory for one copy, so one save is written at a time
        order, found = capture_all(world, step, entries, lambda: self._keep.note(notes.check(metadata, protect)))
        if world.rank != 0:
            captures.hand_over(found[-1])
        path = consensus.decide(world, lambda: str(self._rank_0s.save(order, found)))
        self._in_flight = self._saves_in_background
        if not self._in_flight:
            self.due.written()
        return Path(path)

    @uninterrupted()
    @on_all_ranks("Checkpointer.wait()")
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

    @on_all_ranks("Checkpointer.latest()")
    def latest(self) -> Path | None:
        """Return the path of the newest checkpoint that is whole, down to the last byte; None if there is none.

        Damaged ones are skipped, and rank 0 warns of each once. The path is that on rank 0's host.
        """
        answer = self._ask(RunFolder.newest)
        return None if answer is None else Path(answer)

    @on_all_ranks("Checkpointer.steps()")
    def steps(self) -> list[int]:
        """Return the steps that have a folder, whole or damaged, in ascending order; also one rescued into memory."""
        return list(self._ask(RunFolder.steps))

    @on_all_ranks("Checkpointer.best()")
    def best(self) -> int | None:
        """Return the step of the checkpoint in which ``keep_best`` is best; None if none has it."""
        return cast("int | None", self._ask(RunFolder.best))

    @on_all_ranks("Checkpointer.metadata()")
    def metadata(self, step: int | None = None) -> dict[str, Any]:
        """Return the metadata of the checkpoint of `step`, or of the newest whole one; empty if it has none.

        Raises:
            NoCheckpoint: if there is no such checkpoint, or its metadata are damaged.
        """
        node = self._ask(lambda opened: Encoder().encode(dict(opened.metadata(step))))
        return dict(state_codec.decode(node, {}))

    @uninterrupted()
    @on_all_ranks("Checkpointer.restore()")
    def restore(
        self, step: int | None = None, allow_changed_settings: bool = False, only: Collection[str] | None = None
    ) -> int:
        """Load the newest whole checkpoint, or that of `step`, into the registered objects; return its step.

        Checkpoints later than `step` stay, and a resume without `step` continues from them. So save a run that branches
        off into a folder of its own.

        Everything is compared before anything is loaded. If an object still refuses its state, every registered object
        gets back its earlier state, on every rank.

        The objects' own ``load_state_dict`` gets states on the CPU; modules and optimizers move them to their
        parameters' devices. The random generators are restored exactly if the number of ranks is the same as when it
        was saved; otherwise they stay as they are, and rank 0 says so, unless there are virtual ranks, which need none.

        Optimizers are compared by class, groups, parameters' names and shapes, and the settings that they had when
        they were registered; register them before training.

        Args:
            step: None for the newest that is whole. One that was chosen and is damaged is an error.
            allow_changed_settings: whether settings of optimizers (learning rate, momentum, weight decay, …) may
                differ from the checkpoint's; then this run's are taken over, and rank 0 warns of each. The state comes
                from the checkpoint all the same.
            only: the names of the objects to load, such as the model's for the best weights. The others, the random
                generators and the count of steps stay as they are. None for everything.

        Raises:
            NoCheckpoint: on every rank, if there is no checkpoint, or none that is whole.
            CheckpointMismatch: if it does not fit the registered objects; names the first difference.
            CheckpointError: if it cannot be read.
            UsageError: as an object's ``load_state_dict`` raises it.
        """
        world, entries = self._world(), list(self._registered.values())
        if only is not None:
            if unknown := sorted(set(only) - self._registered.keys()):
                raise UsageError(f"nothing is registered as {unknown[0]!r}; give names of {sorted(self._registered)}")
            entries = [entry for entry in entries if entry.name in only]
        is_part, choose = only is not None, lambda step: self._rank_0s.choose(step)
        saved = restore(world, step, choose, entries, allow_changed_settings, is_part=is_part)
        if is_part:
            return saved.step
        source = "memory" if saved.path.parent == self._recovery.memory else "disk"
        self._recovery.go_on_from(saved.step, source)
        if source == "memory" and isinstance(self.every, int) and self._schedule.is_due(saved.step):
            self.due.save(self, saved.step)  # the failure may have cut its save off
        return saved.step

    @uninterrupted()
    def close(self) -> None:
        """Release the folder for other runs, at the end of training. Harmless when already closed.

        It waits for a save in the background on all ranks, so call it on all of them. While an exception is handled,
        which other ranks may not have, only rank 0 waits, and it warns if the save failed.

        Raises:
            CheckpointError: on every rank, if the save in the background was not written, or if every save that
                ``every`` asked for failed.
        """
        failing, was_open = sys.exc_info()[0] is not None, not self._is_closed
        # A failing rank's black box keeps the phase that the exception comes from.
        with nullcontext() if failing else recorder.span(CHECKPOINT):
            try:
                if was_open and not failing:
                    self._finish(consensus.here())
            finally:
                self._is_closed = True
                # Before the folder is released, because a rescue for a lost rank may write to it.
                self._recovery.close(failing)
                if self._opened is not None:
                    self._opened.close()
                self._opened = None
        if was_open and not failing and self._schedule.is_set:
            self.due.check_some(self._path)

    def __exit__(self, *_: object) -> None:
        self.close()

    def _world(self) -> World:
        if self._is_closed:
            raise UsageError(f"the Checkpointer of {self._path} is closed; make a new one")
        return consensus.here()

    @property
    def _rank_0s(self) -> RunFolder:
        assert self._opened is not None, "only rank 0 uses the folder"
        return self._opened

    def _ask(self, question: Callable[[RunFolder], Any]) -> Any:
        """Return the answer of rank 0's folder to `question`, a JSON value, on every rank."""
        return consensus.decide(self._world(), lambda: question(self._rank_0s))

    def _finish(self, world: World) -> None:
        """Wait on every rank for the background save, if there is one, and raise its error there."""
        if not self._in_flight:
            return
        self._in_flight = False
        try:
            consensus.decide(world, lambda: self._rank_0s.writer.finish())
        except KeyboardInterrupt:
            self._in_flight = True  # the next call waits for it
            raise
        self.due.written()
