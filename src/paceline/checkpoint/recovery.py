"""Recovery after a failure: rescues the last step, and counts recomputed steps after a restart."""

from __future__ import annotations

import atexit
import logging
import os
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from paceline.checkpoint.objects.registered import Registered
from paceline.checkpoint.recovery.emergency_save import COMPLETES_S, Contents, Rescue, rescued_folder
from paceline.checkpoint.recovery.preemption import StopRequests
from paceline.checkpoint.steps.step_barrier import StepBarrier
from paceline.checkpoint.steps.step_boundary import Boundary
from paceline.checkpoint.storage.free_space import nothing_is_kept
from paceline.core.processes import consensus
from paceline.core.processes.missing_ranks import named_ranks
from paceline.core.processes.world import TIMEOUT, World
from paceline.core.state.virtual_ranks import virtual_ranks_of
from paceline.core.telemetry.failure_callbacks import at_failure
from paceline.core.telemetry.step_progress import BEFORE, STEPS, StepRecord, job_folder, key_of, record_path, records_in
from paceline.errors import CheckpointError, CommunicationError

logger = logging.getLogger(__name__)
END_S = 5.0
"""How long a rank that has closed its Checkpointer waits for the other ranks, which may still fail."""


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
            self.go_on_from(0, None)
        if self._barrier is not None:
            self._rescue = Rescue(self.boundary, contents)
            self._forget = at_failure(self._rescue)
            self._process = os.getpid()
            atexit.register(self._leave)

    @property
    def goes_on(self) -> bool:
        """Whether an earlier start has completed a step."""
        return self._reached > 0

    def watch(self, entry: Registered) -> None:
        """Watch the steps of `entry` if it is an optimizer, and record its virtual ranks for the launcher."""
        self.boundary.watch(entry)
        if self.record is not None and (count := virtual_ranks_of(entry.object)):
            self.record.virtual_ranks = count

    def go_on_from(self, step: int, source: str | None) -> None:
        """Continue from `step`, which was restored from `source`."""
        self.boundary.go_on_from(step)
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
        return record, None, nothing_is_kept(error, records)


def _agreed_barrier(world: World, barrier: StepBarrier | None, problem: str) -> StepBarrier | None:
    """Return the `barrier` if every rank has a barrier, otherwise None; rank 0 warns about problems."""
    answers = consensus.gather(world, [barrier is not None, problem])
    problems = {rank: reason for rank, (_, reason) in enumerate(answers) if reason}
    if problems and world.rank == 0:
        logger.warning("%s: %s", named_ranks(list(problems)), next(iter(problems.values())))
    return barrier if all(has_barrier for has_barrier, _ in answers) else None
