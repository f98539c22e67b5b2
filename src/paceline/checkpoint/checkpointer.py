"""The Checkpointer: saves the objects registered with it, and restores them, on any number of ranks.

Rank 0 writes, verifies and reads. The other ranks send it their states and receive what they need, so only rank 0's
host needs the folder. Every decision is rank 0's, and an error on any rank is an error on every rank.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, TypeVar

from paceline import rank_consensus
from paceline.checkpoint import capture, codec, notes, restoring
from paceline.checkpoint.capture import Capture
from paceline.checkpoint.codec import Encoder
from paceline.checkpoint.manifest import Manifest
from paceline.checkpoint.notes import Keep, Notes
from paceline.checkpoint.recovery import History, Recovery
from paceline.checkpoint.registered import Registered, Stateful
from paceline.checkpoint.saved import GENERATORS, RANK_ROLE, Saved, compare
from paceline.checkpoint.schedule import Schedule
from paceline.checkpoint.storage import Storage, reason
from paceline.checkpoint.writer import Draft
from paceline.errors import CheckpointError, DesyncError, UsageError
from paceline.rollcall import called_by_all
from paceline.tracing import CHECKPOINT, recorder
from paceline.world import World

Object = TypeVar("Object", bound=Stateful)
_NAME = re.compile(r"[a-z0-9_]{1,64}")
_RESERVED = ("state", RANK_ROLE, GENERATORS)


class Checkpointer:
    """Saves and restores registered objects as folders ``step-00000120`` in `folder`.

    Make it on all ranks, with the same arguments, and call its methods on all ranks (except :meth:`register`).
    Without a process group this process is the only rank. ::

        checkpointer = Checkpointer("runs/7")
        checkpointer.register("model", model)
        checkpointer.register("optimizer", optimizer)
        step = checkpointer.restore() if checkpointer.steps() else 0
        for batch in batches:
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
    ) -> None:
        world = rank_consensus.here()
        rank_consensus.agree(world, rank_consensus.error_of(_check_folder, folder))
        self._folder = Path(folder).absolute()
        self._keep = Keep(keep, keep_best, best)
        self._registered: dict[str, Registered] = {}
        self._storage: Storage | None = None  # rank 0's
        self._closed = False
        self._schedule = Schedule(every)
        rank_consensus.decide(world, self._open)
        self._recovery = Recovery(world, self._folder, lambda: list(self._registered.values()), lambda: self._storage)

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
        if not isinstance(name, str) or not _NAME.fullmatch(name) or name in _RESERVED:
            raise UsageError(
                f"{name!r} cannot be the name of a registered object; use lower-case letters, digits and "
                f"underscores, and none of {', '.join(_RESERVED)}"
            )
        if name in self._registered:
            raise UsageError(f"an object is registered as {name!r} already; give this one another name")
        if not callable(getattr(object, "state_dict", None)) or not callable(getattr(object, "load_state_dict", None)):
            raise UsageError(
                f"the object to register as {name!r}, a {type(object).__qualname__}, does not have both "
                "state_dict and load_state_dict; give it these methods"
            )
        entry = Registered.of(name, object, per_rank, self._registered)
        entry.capture(Encoder())
        self._registered[name] = entry
        self._recovery.boundary.watch(entry)
        return object

    def step(self, metadata: Mapping[str, Any] | None = None) -> int:
        """Mark the end of a training step, at which everything registered is consistent; return the steps done.

        Call it on all ranks as the last thing of a loop's turn that changes anything: after the optimizer and the
        scheduler, before collectives of your own. It costs microseconds. A turn in which no registered optimizer has
        stepped, because gradients accumulate or a GradScaler skipped it, belongs to the next step. The number counts on
        from what :meth:`restore` returned.

        Under Paceline's launcher, on one host and with parameters on the CPU, no step that ended here is lost when a
        rank ends: the ranks that are left save the last one into memory, and the next start restores it. From the first
        call on, optimizers wait in ``step()`` for all ranks to have their gradients. Elsewhere, inside ``join``, and if
        all ranks end at once, a run goes on from the newest checkpoint on disk.

        Args:
            metadata: as in :meth:`save`, if this step is saved.

        Raises:
            CommunicationError: if a rank has ended.
            CheckpointError: as :meth:`save`, in a step that is saved.
        """
        if self._closed:
            self._world()
        boundary = self._recovery.boundary
        if boundary.mark() and self._schedule.is_due(boundary.step):
            self.save(boundary.step, metadata)
        return boundary.step

    @property
    def history(self) -> History:
        """What has happened to this run so far: restarts, and steps that were computed again."""
        return self._recovery.history()

    @called_by_all("Checkpointer.save()")
    def save(self, step: int, metadata: Mapping[str, Any] | None = None, protect: bool = False) -> Path:
        """Save every registered object as the checkpoint of `step`; it is durable when this returns.

        If `step` is there already it is replaced: the old one goes only once the new one is complete. Then all but the
        newest ``keep`` up to `step`, the protected and the best one are deleted. The path is that on rank 0's host.

        Args:
            step: number of optimizer steps done; the same on every rank.
            metadata: whatever is worth knowing about it, such as ``{"best_acc1": 71.2}``, for :meth:`metadata`;
                numbers, strings, lists and dicts. Rank 0's is saved.
            protect: whether it stays until someone deletes it by hand.

        Raises:
            CheckpointError: on every rank, if it could not be written. Nothing is deleted, and it can be tried again.
            UsageError: if `step` is no whole number from 0 on, the ranks have registered different objects, a
                registered wrapper is in the middle of an accumulation window, or what `keep_best` names is no number.
            DesyncError: if `step` differs between ranks.
        """
        with recorder.span(CHECKPOINT):
            return self._save(step, metadata, protect)

    def _save(self, step: int, metadata: Mapping[str, Any] | None, protect: bool) -> Path:
        world = self._world()
        captures, checked_notes = list[Capture](), list[Notes]()

        def capture_all() -> None:
            checked_notes.append(self._keep.note(notes.check(metadata, protect)))
            self._capture(step, captures)

        rank_consensus.agree(world, rank_consensus.error_of(capture_all))
        size = capture.expect_equal(world, step, list(self._registered.values()), captures)
        *shared, own_states = captures
        if world.rank != 0:
            capture.hand_over(own_states)
        return Path(
            rank_consensus.decide(
                world, lambda: str(self._write(world, step, shared, own_states, checked_notes[0], size))
            )
        )

    @called_by_all("Checkpointer.latest()")
    def latest(self) -> Path | None:
        """Return the path of the newest checkpoint that is whole, down to the last byte; None if there is none.

        Damaged ones are skipped, and rank 0 warns of each once, with the reason. The path is that on rank 0's
        host.
        """
        answer = rank_consensus.decide(self._world(), lambda: _path_of(self._newest()))
        return None if answer is None else Path(answer)

    @called_by_all("Checkpointer.steps()")
    def steps(self) -> list[int]:
        """Return the steps that have a folder, whole or damaged, in ascending order; also one rescued into memory."""
        rescued = self._recovery.rescued_step
        return list(rank_consensus.decide(self._world(), lambda: sorted({*self._store.steps(), *rescued()})))

    @called_by_all("Checkpointer.best()")
    def best(self) -> int | None:
        """Return the step of the checkpoint in which ``keep_best`` is best; None if none has it."""
        return None if (found := rank_consensus.decide(self._world(), self._best)) is None else int(found)

    @called_by_all("Checkpointer.metadata()")
    def metadata(self, step: int | None = None) -> dict[str, Any]:
        """Return the metadata of the checkpoint of `step`, or of the newest whole one; empty if it has none.

        Raises:
            NoCheckpoint: if there is no such checkpoint, or its metadata are damaged.
        """
        node = rank_consensus.decide(self._world(), lambda: Encoder().encode(dict(self._metadata(step))))
        return dict(codec.decode(node, {}))

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
        for rank, theirs in enumerate(rank_consensus.gather(world, step)):
            if theirs != step:
                raise DesyncError(
                    f"rank {rank} restores step {theirs} but rank {world.rank} restores step {step}; choose the "
                    "same step on every rank"
                )
        saved = Saved.open(world, lambda: self._rescued(step) or restoring.choose(self._store, step))
        entries = list(self._registered.values())
        rank_consensus.agree(world, rank_consensus.error_of(compare, entries, saved, world, allow_changed_settings))
        restoring.restore(world, saved, entries, allow_changed_settings)
        self._recovery.go_on_from(saved.step, "disk" if saved.path.parent == self._folder else "memory")
        return saved.step

    def close(self) -> None:
        """Release the folder for other runs. Harmless when already closed."""
        self._closed = True
        self._recovery.close()
        if self._storage is not None:
            self._storage.close()
            self._storage = None

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: object) -> None:
        self.close()

    def _newest(self) -> tuple[Path, Manifest] | None:
        return self._rescued(None) or self._store.newest()

    def _rescued(self, step: int | None) -> tuple[Path, Manifest] | None:
        """Return, on rank 0, the checkpoint in memory if it is the newest, or that of `step`, which is not on disk."""
        return self._recovery.rescued(step, self._store.steps())

    def _best(self) -> int | None:
        return self._keep.best(self._store.notes()) if self._keep.metric else None

    def _metadata(self, step: int | None) -> Mapping[str, Any]:
        if step is None:
            step = restoring.choose(self._store, None)[1].step
        return restoring.read_notes(self._store, step).metadata

    @property
    def _store(self) -> Storage:
        assert self._storage is not None, "only rank 0 uses the folder"
        return self._storage

    def _open(self) -> None:
        self._keep.check()
        self._storage = Storage(self._folder)

    def _world(self) -> World:
        if self._closed:
            raise UsageError(f"the Checkpointer of {self._folder} is closed; make a new one")
        return rank_consensus.here()

    def _entries(self, per_rank: bool) -> list[Registered]:
        return [entry for entry in self._registered.values() if entry.per_rank == per_rank]

    def _capture(self, step: int, captures: list[Capture]) -> None:
        """Append to `captures` each shared object's state, then this rank's own."""
        if type(step) is not int or not 0 <= step < 10**18:
            raise UsageError(f"step must be a whole number >= 0, not {step!r}")
        for entry in self._registered.values():
            entry.expect_whole(step)
        try:
            captures.extend(capture.shared(entry) for entry in self._entries(per_rank=False))
            captures.append(capture.own([*self._entries(per_rank=True), capture.generators()]))
        except Exception as error:
            raise CheckpointError(f"step {step} was not saved: {error}") from error

    def _write(
        self, world: World, step: int, shared: list[Capture], own_states: Capture, checked_notes: Notes, size: int
    ) -> Path:
        """Write everything, `size` bytes, on rank 0, which fetches the other ranks' states one after another."""
        waiting = list(range(1, world.size))
        try:
            with Draft(self._store, step, world.size, size) as draft:
                for each in shared:
                    draft.add_shared(each)
                draft.add_own(0, own_states)
                while waiting:
                    rank = waiting.pop(0)
                    draft.add_own(rank, capture.fetch(rank))
                draft.add_notes(checked_notes)
                path = draft.commit()
        except (OSError, ValueError, MemoryError) as error:
            why = reason(error) if isinstance(error, OSError) else str(error) or type(error).__name__
            raise CheckpointError(
                f"rank 0 could not save step {step} to {self._store.path(step)}: {why}; the checkpoints "
                "before it are intact, remove the cause and save again"
            ) from error
        finally:
            for rank in waiting:
                capture.dismiss(rank)
        self._store.prune(step, self._keep)
        return path


def _check_folder(folder: Any) -> None:
    if not isinstance(folder, str | os.PathLike) or not os.fspath(folder):
        raise UsageError(f"the checkpoint folder must be a path that is not empty, not {folder!r}; name a folder")


def _path_of(found: tuple[Path, Manifest] | None) -> str | None:
    return None if found is None else str(found[0])
