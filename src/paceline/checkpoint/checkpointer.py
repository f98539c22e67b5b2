"""The Checkpointer: saves the objects registered with it, and restores them, on any number of ranks.

Rank 0 writes, verifies and reads. The other ranks send their states to rank 0 and receive their parts from it, so only
rank 0's host needs the folder. Rank 0 makes every decision, and an error on any rank is raised on every rank.
"""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

from torch.optim import Optimizer

from paceline.checkpoint import captures, state_codec
from paceline.checkpoint.due_saves import DueSaves, SaveInterval
from paceline.checkpoint.metadata import Keep, Notes
from paceline.checkpoint.optimizer_states import forget_changed, was_trained
from paceline.checkpoint.recovery import Contents, History, Recovery
from paceline.checkpoint.registered import Registered, Stateful
from paceline.checkpoint.restore import restore
from paceline.checkpoint.run_folder import RunFolder, on_all_ranks, validate_path
from paceline.checkpoint.saving import capture_all
from paceline.checkpoint.signals import uninterrupted
from paceline.checkpoint.state_codec import Encoder
from paceline.core import consensus
from paceline.core.spans import CHECKPOINT, recorder
from paceline.core.stacks import warn
from paceline.core.torch_distributed import local_of
from paceline.core.world import World
from paceline.errors import CheckpointWarning, UsageError

Object = TypeVar("Object", bound=Stateful)


class Checkpointer(AbstractContextManager["Checkpointer"]):
    """Saves and restores registered objects as folders ``step-00000120`` in `folder`.

    Create it on all ranks with the same arguments, and call its methods on all ranks. Without a process group, this
    process is the only rank. ::

        checkpointer = Checkpointer("runs/7")
        checkpointer.register("model", model)
        checkpointer.register("optimizer", optimizer)
        step = checkpointer.restore() if checkpointer.steps() else 0
        ...
            optimizer.step()
            step = checkpointer.step()

    The random generators of every rank are always saved and need not be registered.

    Args:
        folder: the checkpoint folder. A new one is created for this user only (mode 0700, files 0600, minus the umask).
            Only one run can use it at a time. Other files in it are not changed.
        keep: the number of newest checkpoints to keep; at least 1.
        keep_best: the name of a number in the metadata passed to :meth:`save`. The checkpoint with the best value is
            also kept.
        best: whether the largest (``"max"``) or the smallest (``"min"``) number is best; by default the smallest for a
            name that ends in "loss", otherwise the largest.
        every: how often :meth:`step` saves: a number of steps or a time. By default, it never saves. ``"auto"`` saves
            every ``sqrt(2 · cost · mtbf)`` seconds (Young 1974), but at least once an hour and at most once a minute.
            ``cost`` is how long the last such save stopped training. ``mtbf`` is the mean time between failures of the
            job, at 0.0038 failures a day for each host (the rate in the training of Llama 3). The first save is after a
            minute. The interval exceeds an hour if saves would otherwise take more than 2 % of the time.
        async_save: whether :meth:`save` returns after copying all states to rank 0's memory, while a thread writes the
            copy and training continues. Rank 0's host needs memory for the copy and for the other ranks' own states.
            One save is written at a time. The next :meth:`save`, :meth:`wait` or :meth:`close` raises its errors.

    Raises:
        UsageError: on every rank, if an argument is invalid, or if the folder cannot be created or written to, is in
            use by another run, or has a checkpoint in a newer format. After a restart of a job that has completed
            steps, an unwritable folder only causes a warning.
    """

    @on_all_ranks("Checkpointer(…)")
    def __init__(
        self,
        folder: str | os.PathLike[str],
        keep: int = 3,
        keep_best: str | None = None,
        best: Literal["max", "min"] | None = None,
        every: int | timedelta | Literal["auto"] | None = None,
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
        self._in_flight = False  # a background save was started but not awaited; the same on all ranks
        self._registered: dict[str, Registered] = {}
        this = weakref.ref(self)  # weak, so that a deleted Checkpointer releases its folder
        contents = Contents(self._path, self._registered, lambda: getattr(this(), "_opened", None))
        # Create this before the folder is opened, because the folder's steps include rescued steps.
        self._recovery = Recovery(world, contents)
        weakref.finalize(self, self._recovery.stops.close).atexit = False
        self.due = DueSaves(self._recovery.record, world.rank == 0, self._schedule)
        # Last, because it takes the folder's lock. All ranks use the async_save of rank 0.
        self._saves_in_background = bool(consensus.decide(world, lambda: self._open(async_save)))

    def _open(self, async_save: bool) -> bool:
        recovery = self._recovery
        self._opened = RunFolder(self._path, self._keep, async_save, recovery.memory, recovery.has_progress)
        return async_save

    def register(self, name: str, object: Object, per_rank: bool = False) -> Object:
        """Register `object`, to be saved and restored as `name`; return it.

        A module is saved without its data-parallel wrappers, so keys have no ``module.`` prefix.

        Args:
            name: a unique name of lower-case letters, digits and underscores.
            object: anything with ``state_dict`` and ``load_state_dict``. Its state consists of tensors, ``None``,
                booleans, numbers, strings, bytes, lists, tuples and dicts. A method ``check_state_dict`` can reject a
                state before anything is loaded.
            per_rank: whether each rank has a different state. If not, rank 0's state is saved for all.

        Raises:
            UsageError: if the name is invalid or in use, or a value in the object's state cannot be saved.
        """
        entry = Registered.of(name, object, per_rank, self._registered)
        entry.capture(Encoder(None if per_rank else local_of))
        self._registered[name] = entry
        has_seen_steps, others = self._recovery.boundary.has_seen_steps, [*self._registered.values()]
        optimizer = object if entry.is_optimizer or has_seen_steps else getattr(object, "optimizer", None)
        if isinstance(optimizer, Optimizer) and was_trained(optimizer, [each.object for each in others]):
            _forget_changed_settings(each for each in others if each.object is optimizer)
        self._recovery.watch(entry)
        return object

    def step(self, metadata: Mapping[str, Any] | None = None) -> int:
        """Mark the end of a training step, save if a save is due, and return the number of completed steps.

        Call it on all ranks, after the optimizer and the scheduler, and before your own collectives. A call while
        gradients accumulate does not end a step.

        Under ``paceline run``, on one host and on the CPU, a failure loses no completed step: the remaining ranks save
        the last one into memory, and the next start restores it. To make this possible, optimizers wait in ``step()``
        until all ranks have their gradients. In other cases, for example if a rank is lost between the two optimizers
        of a GAN, a run continues from the newest checkpoint on disk.

        After the first call, a SIGTERM, SIGUSR1, SIGHUP or SIGINT to any rank ends the training: all ranks agree on a
        last step and save it. Signals that the script handles itself are left alone. A second signal ends the process
        at once.

        Args:
            metadata: as in :meth:`save`, if this step is saved.

        Raises:
            CommunicationError: if a rank has ended.
            CheckpointError: if the last step could not be saved after a signal. If a due save fails, rank 0 only warns,
            once for each cause, and the next due save tries again.
            Preempted: on every rank, when the last step was saved after a signal; a ``SystemExit``.
        """
        if self.mark_step(metadata):
            self.due.save(self, self._recovery.boundary.step, metadata)
        return self._recovery.boundary.step

    def mark_step(self, metadata: Mapping[str, Any] | None = None) -> bool:
        """Mark the end of a training step, save it after a signal, and return whether the caller has to save now."""
        if self._is_closed:
            self._world()  # raises
        boundary, stops = self._recovery.boundary, self._recovery.stops
        stops.watch()
        if not self._recovery.mark():
            return False
        # Call both after every step, because each can be a collective.
        stop, is_due = stops.agreed(), self._schedule.is_due(boundary.step, boundary.is_apart)
        if stop is not None:
            self.save(boundary.step, metadata)
            self.wait()
            stops.end(stop)
        return is_due

    @property
    def history(self) -> History:
        """Restarts of this run, and recomputed steps."""
        return self._recovery.history()

    @uninterrupted()
    @on_all_ranks("Checkpointer.save()")
    def save(self, step: int, metadata: Mapping[str, Any] | None = None, protect: bool = False) -> Path:
        """Save every registered object as the checkpoint of `step`, and return its path on rank 0's host.

        The checkpoint is durable when this returns, or with ``async_save`` when :meth:`wait` or the next :meth:`save`
        has returned. An existing checkpoint of `step` is replaced after the new one is complete. Then all checkpoints
        up to `step` are deleted except the newest ``keep``, the protected ones and the best one.

        Args:
            step: number of completed optimizer steps; the same on every rank.
            metadata: numbers, strings, lists and dicts that :meth:`metadata` returns, such as ``{"acc1": 71.2}``. Rank
                0's metadata is saved.
            protect: whether to keep the checkpoint until you delete it yourself.

        Raises:
            CheckpointError: on every rank, if the checkpoint could not be written. No checkpoint is deleted. With
                ``async_save``, also if the previous save has failed; then this one is not started.
            UsageError: if `step` is not a whole number >= 0, the ranks have registered different objects, a registered
                wrapper is in the middle of an accumulation window, or the `keep_best` value is not a number.
            DesyncError: if `step` differs between ranks.
        """
        world, entries = self._world(), list(self._registered.values())
        if step and not self._recovery.boundary.has_seen_steps:
            _forget_changed_settings(entries)
        self._finish(world)  # only one save is written at a time
        order, captured = capture_all(world, step, entries, lambda: self._keep.note(Notes.of(metadata, protect)))
        if world.rank != 0:
            captures.hand_over(captured[-1])
        path = consensus.decide(world, lambda: str(self._rank_0s.save(order, captured)))
        self._in_flight = self._saves_in_background
        if not self._in_flight:
            self.due.written()
        return Path(path)

    @uninterrupted()
    @on_all_ranks("Checkpointer.wait()")
    def wait(self) -> None:
        """Wait until a background save is durable.

        Raises:
            CheckpointError: on every rank, if the save has failed; raised once.
        """
        self._finish(self._world())

    @on_all_ranks("Checkpointer.latest()")
    def latest(self) -> Path | None:
        """Return the path of the newest intact checkpoint on rank 0's host, or None.

        Every byte is verified. Damaged checkpoints are skipped, and rank 0 warns about each one once.
        """
        answer = self._ask(RunFolder.newest)
        return None if answer is None else Path(answer)

    @on_all_ranks("Checkpointer.steps()")
    def steps(self) -> list[int]:
        """Return the steps of all checkpoints, intact or damaged, on disk and in memory, in ascending order."""
        return list(self._ask(RunFolder.steps))

    @on_all_ranks("Checkpointer.best()")
    def best(self) -> int | None:
        """Return the step with the best value of ``keep_best``, or None."""
        return cast("int | None", self._ask(RunFolder.best))

    @on_all_ranks("Checkpointer.metadata()")
    def metadata(self, step: int | None = None) -> dict[str, Any]:
        """Return the metadata of the checkpoint of `step`, by default of the newest intact checkpoint.

        Raises:
            NoCheckpoint: if the checkpoint does not exist, or its metadata is damaged.
        """
        node = self._ask(lambda opened: Encoder().encode(dict(opened.metadata(step))))
        return dict(state_codec.decode(node, {}))

    @uninterrupted()
    @on_all_ranks("Checkpointer.restore()")
    def restore(
        self, step: int | None = None, allow_changed_settings: bool = False, only: Collection[str] | None = None
    ) -> int:
        """Load a checkpoint into the registered objects; return its step.

        All objects are compared with the checkpoint before anything is loaded. If an object still rejects its state,
        every rank restores the earlier states of all objects.

        Objects receive their states on the CPU; modules and optimizers move them to the devices of their parameters.
        Random generators are restored if the number of ranks is the same; otherwise they keep their state, and rank 0
        warns unless the model has virtual ranks.

        Optimizers are compared by class, groups, names and shapes of parameters, and the settings that each group had
        when it was registered or added. If an optimizer is registered after training has begun, rank 0 warns about
        settings that may have changed; they are restored without a comparison.

        Checkpoints later than `step` are kept, and a restore without `step` uses them, so save a new branch to another
        folder.

        Args:
            step: the step to load; by default, that of the newest intact checkpoint. It is an error if the checkpoint
                of this step is damaged.
            allow_changed_settings: whether settings of optimizers (learning rate, momentum, weight decay, …) can differ
                from the checkpoint. If so, this run's settings are kept, and rank 0 warns about each difference.
            only: the names of the objects to load, for example the model for the best weights. The other objects, the
                random generators and the number of steps do not change. By default, all are loaded.

        Raises:
            NoCheckpoint: on every rank, if no valid checkpoint is found.
            CheckpointMismatch: if the checkpoint does not fit the registered objects.
            CheckpointError: if the checkpoint cannot be read.
        """
        world, entries = self._world(), list(self._registered.values())
        if only is not None:
            if unknown := sorted(set(only) - self._registered.keys()):
                raise UsageError(f"no object is registered as {unknown[0]!r}; choose from {sorted(self._registered)}")
            entries = [entry for entry in entries if entry.name in only]
        is_part, choose = only is not None, lambda step: self._rank_0s.choose(step)
        saved = restore(world, step, choose, entries, allow_changed_settings, is_part=is_part)
        if is_part:
            return saved.step
        source = "memory" if saved.path.parent == self._recovery.memory else "disk"
        self._recovery.resume_from(saved.step, source)
        if source == "memory" and isinstance(self.every, int) and self._schedule.is_due(saved.step):
            self.due.save(self, saved.step)  # the failure may have interrupted its save
        return saved.step

    @uninterrupted()
    def close(self) -> None:
        """Release the folder for other runs, at the end of training. Further calls have no effect.

        Call it on all ranks; they wait for a background save. While an exception is being handled, only rank 0 waits,
        and it warns if the save has failed.

        Raises:
            CheckpointError: on every rank, if the background save, or every save due by ``every``, has failed.
        """
        failing, was_open = sys.exc_info()[0] is not None, not self._is_closed
        # A failing rank keeps the phase of the exception in its black box.
        with nullcontext() if failing else recorder.span(CHECKPOINT):
            try:
                if was_open and not failing:
                    self._finish(consensus.here())
            finally:
                self._is_closed = True
                # Before the folder is released, because a rescue may write to it.
                self._recovery.close(failing)
                if self._opened is not None:
                    self._opened.close()
                self._opened = None
        if was_open and not failing and self.every is not None:
            self.due.check_some(self._path)

    def __exit__(self, *_: object) -> None:
        self.close()

    def _world(self) -> World:
        if self._is_closed:
            raise UsageError(f"the Checkpointer of {self._path} is closed; create a new one")
        return consensus.here()

    @property
    def _rank_0s(self) -> RunFolder:
        assert self._opened is not None, "only rank 0 uses the folder"
        return self._opened

    def _ask(self, question: Callable[[RunFolder], Any]) -> Any:
        """Return rank 0's answer to `question`, a JSON value, on every rank."""
        return consensus.decide(self._world(), lambda: question(self._rank_0s))

    def _finish(self, world: World) -> None:
        """Wait for a background save on every rank, and raise its error."""
        if not self._in_flight:
            return
        self._in_flight = False
        try:
            consensus.decide(world, lambda: self._rank_0s.writer.finish())
        except KeyboardInterrupt:
            self._in_flight = True  # the next call waits for it
            raise
        self.due.written()


def _forget_changed_settings(trained: Iterable[Registered]) -> None:
    """Forget settings that may have changed because an optimizer was `trained` before it was registered."""
    for entry in trained:
        optimizer = entry.stepping or entry.object
        if (keys := forget_changed(optimizer, entry.options)) and consensus.here().rank == 0:
            warn(
                f"{entry.name!r} was trained before it was registered, and its {', '.join(keys)} may have changed; a "
                "restore uses the saved values without comparing them with the script; register it before training",
                CheckpointWarning,
            )
