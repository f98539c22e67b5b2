"""Recovery after a failure: rescues the last step, and counts recomputed steps after a restart."""

from __future__ import annotations

import atexit
import fcntl
import logging
import os
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from paceline.checkpoint import captures, rank_states, step_folders
from paceline.checkpoint.captures import Capture
from paceline.checkpoint.manifest import GENERATORS
from paceline.checkpoint.metadata import Keep, Notes
from paceline.checkpoint.rank_states import OwnStates, StepBarrier, states_path
from paceline.checkpoint.registered import Registered
from paceline.checkpoint.run_folder import RunFolder
from paceline.checkpoint.saving import Part, Save, write
from paceline.checkpoint.signals import StopRequests
from paceline.checkpoint.step_boundary import Boundary, holder_of
from paceline.checkpoint.step_folders import Storage, full_memory_message
from paceline.core import consensus
from paceline.core.failpoints import strike
from paceline.core.failure_callbacks import at_failure
from paceline.core.messages import say
from paceline.core.missing_ranks import named_ranks
from paceline.core.step_progress import (
    BEFORE,
    RESCUE,
    RESTARTS,
    STEPS,
    StepRecord,
    job_folder,
    key_of,
    record_path,
    records_in,
)
from paceline.core.virtual_ranks import virtual_ranks_of
from paceline.core.world import TIMEOUT, World
from paceline.errors import CheckpointError, CommunicationError, UsageError

logger = logging.getLogger(__name__)
COMPLETES_S = 2.0
"""Maximum time that a rank may take from the barrier to the end of its step."""
END_S = 5.0
"""How long a rank that has closed its Checkpointer waits for the other ranks, which may still fail."""
DESTINATION = "destination"
"""Name of the file in a folder of rescued checkpoints that contains the path of the checkpoint folder."""


@dataclass(frozen=True)
class Contents:
    """The objects that a Checkpointer saves, and its folder."""

    folder: Path
    registered: Mapping[str, Registered]
    """The registered objects by name; more may be added."""
    run_folder: Callable[[], RunFolder | None]
    """Returns the opened checkpoint folder, on rank 0."""

    def entries(self) -> list[Registered]:
        return list(self.registered.values())


@dataclass(frozen=True)
class History:
    """The failures of a run, and their cost."""

    restarts: int
    """Number of restarts of all ranks."""
    steps_redone: int
    """Completed optimizer steps that were computed again."""
    rescued_from: str | None
    """Source of the restored step: ``"memory"`` or ``"disk"``; None if no step was restored after a restart."""


class Recovery:
    """The boundary of a Checkpointer's steps, and the records that outlive this rank.

    All ranks create it together: either all of them can rescue, or none can.
    """

    _latest: ClassVar[weakref.ref[Recovery] | None] = None
    """The instance whose steps were marked last."""
    _has_warned: ClassVar[bool] = False
    """Whether this process has warned about two alternating Checkpointers."""

    def __init__(self, world: World, contents: Contents) -> None:
        job = job_folder()
        # Use rank 0's key, because other ranks may use a different path for the same folder.
        key = str(consensus.decide(world, lambda: key_of(contents.folder)))
        records = None if job is None or os.environ["WORLD_SIZE"] != str(world.size) else job / STEPS / key
        self.memory = None if records is None else rescued_folder(records)
        """The folder of checkpoints rescued into memory, which may not exist; None without rescues."""
        self.record, barrier, problem = _open(records, world, contents.folder)
        """This rank's record; the launcher reads it to decide whether the run can continue."""
        self._barrier = _agreed_barrier(world, barrier, problem)
        if self._barrier is None and self.record is not None:
            self.record.is_alone = True
        self._reached, self._redone = 0, 0
        """The last step that an earlier start completed, and the number of recomputed steps up to that point."""
        self.boundary = Boundary(contents.entries, self._barrier, self.record)
        self.stops = StopRequests(self.boundary, self.record, saves=job is None or job not in contents.folder.parents)
        self._source: str | None = None
        self._marks = self._is_closed = False
        self._forget: Callable[[], None] | None = None
        if records is not None and self.record is not None:
            earlier = records_in(records.parent.parent / BEFORE / records.name)
            self._reached = max((max(record.completed, record.restored) for record in earlier), default=0)
            self._redone = max(((record.restored, record.redone) for record in earlier), default=(0, 0))[1]
            if any(record.is_durable for record in earlier):
                self.record.is_durable = True
            self.resume_from(0, None)
        if self._barrier is not None:
            self._rescue = Rescue(self.boundary, contents)
            self._forget = at_failure(self._rescue)
            self._process = os.getpid()
            atexit.register(self._leave)

    @property
    def has_progress(self) -> bool:
        """Whether an earlier start has completed a step."""
        return self._reached > 0

    def watch(self, entry: Registered) -> None:
        """Watch the steps of `entry` if it is an optimizer, and record its virtual ranks for the launcher."""
        self.boundary.watch(entry)
        if self.record is not None and (count := virtual_ranks_of(entry.object)):
            self.record.virtual_ranks = count

    def resume_from(self, step: int, source: str | None) -> None:
        """Continue from `step`, which was restored from `source`."""
        self.boundary.resume_from(step)
        self._source = source
        if self.record is not None:
            self.record.restore(step, source, max(0, self._redone + self._reached - step))

    def mark(self) -> bool:
        """Mark the end of a step, and return whether an optimizer step has ended; see :meth:`Boundary.mark`."""
        latest = None if Recovery._latest is None else Recovery._latest()
        if latest is not self:
            if self._marks and latest is not None and not latest._is_closed and not Recovery._has_warned:
                Recovery._has_warned = True
                logger.warning(
                    "two Checkpointers mark steps in turn, and after a failure each restores its own step; register "
                    "all trained objects with one of them, and call only save() on the other"
                )
            Recovery._latest = weakref.ref(self)
        self._marks = True
        return self.boundary.mark()

    def history(self) -> History:
        restarts = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
        redone = 0 if self.record is None else self.record.redone
        return History(restarts, redone, self._source if restarts else None)

    def close(self, failing: bool) -> None:
        """Stop rescuing. If this rank is `failing`, only make optimizers stop waiting."""
        self.stops.close()
        self._is_closed = True
        if failing:
            self.boundary.retire()
            return
        if self.record is not None:
            # Set before waiting for the other ranks, because they also wait for this rank.
            self.record.has_ended = True
        if self._barrier is not None:
            if self.boundary.can_be_saved:
                self._rescue_for(self._barrier.wait_for_end(END_S))
            atexit.unregister(self._leave)
        self.boundary.close()
        if self._forget is not None:
            self._forget()

    def _leave(self) -> None:
        """At this rank's exit, rescue the step if a rank is lost; the script may have swallowed the error."""
        # A forked child inherits this exit handler, but only its parent is the rank.
        if self._barrier is not None and os.getpid() == self._process and not self._rescue.was_called:
            # Set first, so that the other ranks do not consider this rank lost.
            self._barrier.record.has_exited = True
            self._barrier.wait_for_step(self.boundary.step, COMPLETES_S)
            self._rescue_for(self._barrier.lost_ranks())

    def _rescue_for(self, gone: list[int]) -> None:
        if not gone:
            return
        try:
            self._rescue(CommunicationError(f"{named_ranks(gone)} ended before the training did").because_of(gone))
        except CheckpointError as error:
            logger.error("%s", error)


def _open(records: Path | None, world: World, checkpoints: Path) -> tuple[StepRecord | None, StepBarrier | None, str]:
    """Return this rank's record in `records`, its barrier, and the problem with that folder, if any."""
    if records is None:
        return None, None, ""
    record = None
    try:
        records.mkdir(mode=0o700, parents=True, exist_ok=True)
        record = StepRecord(record_path(records, world.rank), make=True, folder=checkpoints)
        timeout = float(os.environ.get(TIMEOUT, "600"))
        return record, StepBarrier(records, world.rank, world.size, timeout, record), ""
    except OSError as error:
        return record, None, full_memory_message(error, records)


def _agreed_barrier(world: World, barrier: StepBarrier | None, problem: str) -> StepBarrier | None:
    """Return the `barrier` if every rank has a barrier, otherwise None; rank 0 warns about problems."""
    answers = consensus.gather(world, [barrier is not None, problem])
    problems = {rank: reason for rank, (_, reason) in enumerate(answers) if reason}
    if problems and world.rank == 0:
        logger.warning("%s: %s", named_ranks(list(problems)), next(iter(problems.values())))
    return barrier if all(has_barrier for has_barrier, _ in answers) else None


def rescued_folder(records: Path) -> Path:
    """Return the folder in memory for rescued checkpoints, next to the folder of step `records`."""
    return records.parent.parent / RESCUE / records.name


class Rescue:
    """Saves the last completed step into memory when an error ends this rank, for example because a rank is lost.

    Any remaining rank whose optimizers have not stepped since the last boundary can save it: these ranks have the same
    parameters and optimizer states, and the per-rank states of all ranks, including the lost ones, are in memory. The
    first rank to take the lock saves, and the others wait. The result is an ordinary checkpoint in the job's folder in
    memory, so a full disk does not matter. If memory is full, or the launcher will not restart the ranks, it is written
    to the checkpoint folder. If an optimizer has stepped on every remaining rank, for example during the backward of a
    GAN's generator, no rank can save.
    """

    def __init__(self, boundary: Boundary, contents: Contents) -> None:
        self._boundary, self._contents = boundary, contents
        self.was_called = False

    def __call__(self, error: BaseException) -> None:
        """Save the last boundary, unless another rank did, its weights are wrong, or `error` is a user's mistake."""
        self.was_called = True
        barrier = self._boundary.barrier
        blamed = getattr(error, "blamed", None) is not None
        if barrier is None or not self._boundary.can_be_saved or (isinstance(error, UsageError) and not blamed):
            return
        if any(entry.is_sharded for entry in self._contents.entries()):
            return  # the lost rank's parts of DTensors are gone
        step, memory = self._boundary.step, rescued_folder(barrier.folder)
        with _locked(memory):
            if step in _steps(memory) or step in _steps(self._contents.folder):
                return
            strike("rescue")
            # Ranks that have passed the barrier store their states when they complete the step.
            barrier.wait_for_step(step, COMPLETES_S)
            try:
                ranks = _all_own_states(barrier, step)
                self._boundary.load_buffers(rank_states.buffers_in(ranks[0]))  # checkpoints have rank 0's buffers
                shared = [captures.shared(entry) for entry in self._boundary.states()]
                self._save(step, shared, ranks, memory)
            except (OSError, ValueError, MemoryError) as problem:
                raise CheckpointError(f"the completed step {step} was not rescued: {problem}") from problem

    def _save(self, step: int, shared: Sequence[Capture], ranks: Sequence[OwnStates], memory: Path) -> None:
        if int(os.environ.get(RESTARTS, "0")):  # without a restart, nobody would read the checkpoint from memory
            try:
                store = Storage(memory)
                # Written before the checkpoint, because this rank may be killed.
                (memory / DESTINATION).write_text(str(self._contents.folder), errors="surrogateescape")
                self._write(store, step, shared, ranks)
                store.prune(step, Keep(1, None, "max"))
                return
            except (OSError, UsageError) as error:
                if memory.parent.parent in self._contents.folder.parents:  # a Trainer without a checkpoint folder
                    raise
                reason = error.strerror if isinstance(error, OSError) else error
                say(f"note: no room in memory for step {step} ({reason}); it is saved to {self._contents.folder}")
        opened = self._contents.run_folder()
        self._write(Storage(self._contents.folder) if opened is None else opened.settled(), step, shared, ranks)

    def _write(self, store: Storage, step: int, shared: Sequence[Capture], ranks: Sequence[OwnStates]) -> None:
        states: list[Part] = [*((None, capture) for capture in shared), *enumerate(map(_joined, ranks))]
        size = sum(step_folders.needed(capture.tensors.values()) for _, capture in states)
        write(store, Save(step, len(ranks), size, Notes()), store.start(step, size), states)


def _joined(states: OwnStates) -> Capture:
    """Return the capture to save for one rank."""
    holder = holder_of(rank_states.generators_in(states))
    objects, generators = rank_states.objects_in(states), captures.own([Registered(GENERATORS, holder, per_rank=True)])
    return Capture(
        {**objects.nodes, **generators.nodes},
        {**objects.tensors, **generators.tensors},
        {**objects.aliases, **generators.aliases},
    )


def _all_own_states(barrier: StepBarrier, step: int) -> list[OwnStates]:
    """Return the states of all ranks at the end of `step`, reconstructed for ranks that ended during it."""
    states = [_own_states(barrier, rank, step) for rank in range(barrier.size)]
    prepared = _own_states(barrier, barrier.rank, step, prepared=True)
    for rank in range(barrier.size):
        if barrier.completed(rank) < step:
            states[rank] = rank_states.carry_over(rank, states[rank], prepared, states[barrier.rank])
    return states


def _own_states(barrier: StepBarrier, rank: int, step: int, *, prepared: bool = False) -> OwnStates:
    states = rank_states.read_own_states(states_path(barrier.folder, rank), step, prepared=prepared)
    if not states:
        raise CheckpointError(f"rank {rank} has not stored its own states for step {step}")
    return states


def _steps(folder: Path) -> list[int]:
    try:
        return step_folders.steps_in(folder)
    except CheckpointError:  # missing or unreadable
        return []


@contextmanager
def _locked(memory: Path) -> Iterator[None]:
    """Wait until no other rank is saving. The lock of a killed rank is released."""
    memory.parent.mkdir(mode=0o700, exist_ok=True)
    descriptor = os.open(memory.with_name(f"{memory.name}.lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
