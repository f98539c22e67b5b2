"""The rescue: when a rank is gone, the remaining ranks save the last completed step into memory.

Every remaining rank whose optimizer has not stepped since the last boundary could save it: they have the same
parameters and optimizer states, and the own states of all ranks, including the lost ones, are in memory. The first rank
to take the lock saves; the others wait and find it done. The result is an ordinary checkpoint in the job's folder in
memory, so a full disk does not matter. If memory has no room, or the launcher will not restart the ranks, it goes to
the checkpoint folder.
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
from paceline.checkpoint.saving.writer import Draft
from paceline.checkpoint.steps.missing_rank_state import carry_over
from paceline.checkpoint.steps.rank_states import OwnStates, read_own_states
from paceline.checkpoint.steps.step_barrier import StepBarrier, states_path
from paceline.checkpoint.steps.step_boundary import Boundary
from paceline.checkpoint.steps.step_snapshot import holder_of, load_buffers
from paceline.checkpoint.storage import free_space, step_folders
from paceline.checkpoint.storage.step_folders import Storage
from paceline.core.output.messages import say
from paceline.core.telemetry.failpoints import strike
from paceline.core.telemetry.failure_callbacks import with_causes
from paceline.core.telemetry.step_progress import RESCUE, RESTARTS
from paceline.errors import CheckpointError, UsageError, WrongComputation

COMPLETES_S = 2.0
"""Longest time that a running rank may take from the barrier to the end of its step."""
DESTINATION = "destination"
"""File in a folder of rescued checkpoints: the checkpoint folder that they belong to."""


def rescued_folder(records: Path) -> Path:
    """Return the folder in memory for rescued checkpoints of the checkpoint folder whose step records are there."""
    return records.parent.parent / RESCUE / records.name


@dataclass(frozen=True)
class Contents:
    """The objects that a Checkpointer saves, and the folder for them."""

    folder: Path
    registered: Mapping[str, Registered]
    """The registered objects by name; it grows while objects are registered."""
    run_folder: Callable[[], RunFolder | None]
    """Returns the opened checkpoint folder, on rank 0."""

    def entries(self) -> list[Registered]:
        """Return the registered objects."""
        return list(self.registered.values())


class Rescue:
    """Saves the boundary of this rank when an error ends it.

    Args:
        boundary: the step boundary; it must have a barrier.
        contents: the contents of the Checkpointer.
    """

    def __init__(self, boundary: Boundary, contents: Contents) -> None:
        self._boundary, self._contents = boundary, contents
        self.was_called = False

    def __call__(self, error: BaseException) -> None:
        """Save the last boundary, unless another rank has done so, or this one is wrong, or the user made a mistake."""
        self.was_called = True
        barrier = self._boundary.barrier
        blamed = getattr(error, "blamed", None) is not None
        if barrier is None or not self._boundary.can_be_saved or (isinstance(error, UsageError) and not blamed):
            return
        if _is_of_wrong_rank(error):
            return  # a flipped bit of this rank's weights would be in all replicas of the next start
        if any(entry.is_sharded for entry in self._contents.entries()):
            return  # the lost rank's parts of DTensors are gone, and gathering them would wait for that rank
        step, memory = self._boundary.step, rescued_folder(barrier.folder)
        with _turn(memory):
            if step in _steps(memory) or step in _steps(self._contents.folder):
                return
            strike("rescue")
            # Ranks that passed the barrier are in the optimizer's step, and store their states at its end.
            barrier.wait_for_step(step, COMPLETES_S)
            try:
                ranks = _all_own_states(barrier, step)
                load_buffers(self._contents.entries(), ranks[0].buffers)  # every checkpoint has rank 0's buffers
                shared = [captures.shared(entry) for entry in self._boundary.states()]
                self._save(step, shared, ranks, memory)
            except (OSError, ValueError, MemoryError) as problem:
                raise CheckpointError(f"the completed step {step} was not rescued: {problem}") from problem

    def _save(self, step: int, shared: Sequence[Capture], ranks: Sequence[OwnStates], memory: Path) -> None:
        if int(os.environ.get(RESTARTS, "0")):  # otherwise no start would look for it in memory
            try:
                store = Storage(memory)
                # Before the checkpoint: whoever finds that later, maybe because this rank was killed, must know where
                # it belongs.
                (memory / DESTINATION).write_text(str(self._contents.folder))
                self._write(store, step, shared, ranks)
                store.prune(step, Keep(1, None, "max"))
                return
            except (OSError, UsageError) as error:
                if memory.parent.parent in self._contents.folder.parents:  # a Trainer without a folder
                    raise
                reason = error.strerror if isinstance(error, OSError) else error
                say(f"note: no room in memory for step {step} ({reason}); it goes to {self._contents.folder}")
        # Rank 0 owns the folder while it is alive, and it will get its turn.
        opened = self._contents.run_folder()
        self._write(Storage(self._contents.folder) if opened is None else opened.settled(), step, shared, ranks)

    def _write(self, store: Storage, step: int, shared: Sequence[Capture], ranks: Sequence[OwnStates]) -> None:
        states: list[Part] = [*((None, each) for each in shared), *enumerate(map(_joined, ranks))]
        size = sum(free_space.needed(each.tensors.values()) for _, each in states)
        Draft(store, Save(step, len(ranks), size, Notes())).write(states)


def _is_of_wrong_rank(error: BaseException) -> bool:
    """Return whether `error` is or comes from a wrong computation of this rank, which a script may have caught."""
    found = next((each for each in with_causes(error) if isinstance(each, WrongComputation)), None)
    return found is not None and not found.may_save


def _joined(states: OwnStates) -> Capture:
    """Return the capture to save for one rank."""
    generators = captures.own([Registered(GENERATORS, holder_of(states.generators), per_rank=True)])
    return Capture(
        {**states.objects.nodes, **generators.nodes},
        {**states.objects.tensors, **generators.tensors},
        {**states.objects.aliases, **generators.aliases},
    )


def _all_own_states(barrier: StepBarrier, step: int) -> list[OwnStates]:
    """Return the states of all ranks at the end of `step`; for ranks that ended in it, derive them from this rank's."""
    found = [_own_states(barrier, rank, step) for rank in range(barrier.size)]
    before = _own_states(barrier, barrier.rank, step, prepared=True)
    for rank in range(barrier.size):
        if barrier.completed(rank) < step:
            found[rank], unknown = carry_over(found[rank], before, found[barrier.rank])
            if unknown:
                say(
                    f"note: rank {rank} ended between the optimizer and the end of step {step}, where its "
                    f"{', '.join(unknown)} changed in a way that nobody knows; it goes on with what it had before"
                )
    return found


def _own_states(barrier: StepBarrier, rank: int, step: int, *, prepared: bool = False) -> OwnStates:
    found = read_own_states(states_path(barrier.folder, rank), step, prepared=prepared)
    if found is None:
        raise CheckpointError(f"rank {rank} has not stored its own states of it")
    return found


def _steps(folder: Path) -> list[int]:
    try:
        return step_folders.steps_in(folder)
    except CheckpointError:  # it is not there, or cannot be read
        return []


@contextmanager
def _turn(memory: Path) -> Iterator[None]:
    """Wait until no other rank is saving. If that rank is killed, the next one gets its turn."""
    memory.parent.mkdir(mode=0o700, exist_ok=True)
    descriptor = os.open(memory.with_name(f"{memory.name}.lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
