"""The rescue: after a rank is lost, the remaining ranks save the last completed step into memory.

Any remaining rank whose optimizers have not stepped since the last boundary can save it: these ranks have the same
parameters and optimizer states, and the per-rank states of all ranks, including the lost ones, are in memory. The first
rank to take the lock saves, and the others wait. The result is an ordinary checkpoint in the job's folder in memory, so
a full disk does not matter. If memory is full, or the launcher will not restart the ranks, it is written to the
checkpoint folder. If an optimizer has stepped on every remaining rank, for example during the backward of a GAN's
generator, no rank can save.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from paceline.checkpoint import captures
from paceline.checkpoint.captures import Capture
from paceline.checkpoint.format.manifest import GENERATORS
from paceline.checkpoint.format.metadata import Keep, Notes
from paceline.checkpoint.objects.registered import Registered
from paceline.checkpoint.saving.run_folder import RunFolder
from paceline.checkpoint.saving.save import Part, Save
from paceline.checkpoint.saving.writer import write
from paceline.checkpoint.steps import rank_states
from paceline.checkpoint.steps.rank_states import OwnStates
from paceline.checkpoint.steps.step_barrier import StepBarrier, states_path
from paceline.checkpoint.steps.step_boundary import Boundary
from paceline.checkpoint.steps.step_snapshot import holder_of
from paceline.checkpoint.storage import free_space, step_folders
from paceline.checkpoint.storage.step_folders import Storage
from paceline.core.output.messages import say
from paceline.core.telemetry.failpoints import strike
from paceline.core.telemetry.failure_callbacks import with_causes
from paceline.core.telemetry.step_progress import RESCUE, RESTARTS
from paceline.errors import CheckpointError, UsageError, WrongComputation

COMPLETES_S = 2.0
"""Maximum time that a rank may take from the barrier to the end of its step."""
DESTINATION = "destination"
"""Name of the file in a folder of rescued checkpoints that contains the path of the checkpoint folder."""


def rescued_folder(records: Path) -> Path:
    """Return the folder in memory for rescued checkpoints, next to the folder of step `records`."""
    return records.parent.parent / RESCUE / records.name


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


class Rescue:
    """Saves the last boundary of this rank when an error ends the rank."""

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
        if _is_from_wrong_rank(error):
            return  # otherwise, all replicas would have this rank's wrong weights after a restart
        if any(entry.is_sharded for entry in self._contents.entries()):
            return  # the lost rank's parts of DTensors are gone
        step, memory = self._boundary.step, rescued_folder(barrier.folder)
        with _turn(memory):
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
        size = sum(free_space.needed(capture.tensors.values()) for _, capture in states)
        write(store, Save(step, len(ranks), size, Notes()), store.start(step, size), states)


def _is_from_wrong_rank(error: BaseException) -> bool:
    """Return whether a wrong computation on this rank caused `error`."""
    wrong = next((cause for cause in with_causes(error) if isinstance(cause, WrongComputation)), None)
    return wrong is not None and not wrong.may_save


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
def _turn(memory: Path) -> Iterator[None]:
    """Wait until no other rank is saving. The lock of a killed rank is released."""
    memory.parent.mkdir(mode=0o700, exist_ok=True)
    descriptor = os.open(memory.with_name(f"{memory.name}.lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
