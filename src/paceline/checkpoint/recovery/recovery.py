"""Recovery after a failure: rescue of the last step, start of the next attempt, count of recomputed steps."""

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
"""How long a rank that has closed its Checkpointer waits for the others, in case one of them fails before it closes."""


@dataclass(frozen=True)
class History:
    """The failures of a run so far, and their price."""

    restarts: int
    """Number of times that the launcher has restarted all ranks."""
    steps_redone: int
    """Completed optimizer steps that had to be computed again."""
    rescued_from: str | None
    """Source of the restored step: ``"memory"`` or ``"disk"``; None for the beginning, and for a first start."""


class Recovery:
    """The boundary of a Checkpointer's steps, and the records that survive this rank.

    Args:
        world: the ranks.
        key: the checkpoint folder's key, the same on all ranks.
        contents: the contents of the Checkpointer.
    """

    _latest: ClassVar[weakref.ref[Recovery] | None] = None
    """The instance whose steps were marked last."""
    _were_told: ClassVar[bool] = False
    """Whether the warning about two alternating Checkpointers was given."""

    def __init__(self, world: World, key: str, contents: Contents) -> None:
        job = job_folder()
        records = None if job is None or os.environ["WORLD_SIZE"] != str(world.size) else job / STEPS / key
        self.memory = None if records is None else rescued_folder(records)
        """The folder of checkpoints rescued into memory, which need not exist; None if nothing is rescued."""
        self.record, self._barrier, self._problem = _open(records, world, contents.folder)
        """This rank's record, kept even without a barrier because it tells the launcher that the run can continue; the
        barrier; and the reason why there is none although there could be one."""
        self._reached, self._redone = 0, 0
        """The last step that an earlier start completed, and the steps redone by then. A start that ended before it
        restored anything was on its way to redo all of them, so the next may take some back."""
        self.boundary = Boundary(contents.entries, self._barrier, self.record)
        self.stops = StopRequests(self.boundary, self.record, saves=job is None or job not in contents.folder.parents)
        self._source: str | None = None
        self._marks = self._is_closed = False
        """Whether a step was marked, and whether marking has ended."""
        self._forget: Callable[[], None] | None = None
        if records is not None and self.record is not None:
            before = records_in(records.parent.parent / BEFORE / records.name)
            self._reached = max((max(record.completed, record.restored) for record in before), default=0)
            self._redone = max(((record.restored, record.redone) for record in before), default=(0, 0))[1]
            if any(record.is_durable for record in before):
                self.record.is_durable = True
            self.go_on_from(0, None)
        if self._barrier is not None:
            self._rescue = Rescue(self.boundary, contents)
            self._forget = at_failure(self._rescue)
            self._process = os.getpid()
            atexit.register(self._leave)

    @property
    def goes_on(self) -> bool:
        """Whether an earlier start of this job has completed a step."""
        return self._reached > 0

    @classmethod
    def of_all(cls, world: World, contents: Contents) -> Recovery:
        """Create it on all ranks together: either all ranks can rescue, or no rank can."""
        # Other ranks may use another path for the same folder.
        key = str(consensus.decide(world, lambda: key_of(contents.folder)))
        made = cls(world, key, contents)
        told = consensus.gather(world, [made._barrier is not None, made._problem])
        problems = {rank: problem for rank, (_, problem) in enumerate(told) if problem}
        if problems and world.rank == 0:
            logger.warning("%s: %s", named_ranks(list(problems)), next(iter(problems.values())))
        # All or none, because the others would wait at the barrier for a rank that has none.
        if not all(has_barrier for has_barrier, _ in told):
            made._give_up()
        return made

    def _give_up(self) -> None:
        """Disable the rescue because another rank cannot take part."""
        if self._barrier is not None:
            self.boundary.leave_barrier()
            self._barrier = None
            if self._forget is not None:
                self._forget()
            atexit.unregister(self._leave)

    def watch(self, entry: Registered) -> None:
        """Notice the steps of `entry`, if it is an optimizer, and tell the launcher of its virtual ranks."""
        self.boundary.watch(entry)
        if self.record is not None and (count := virtual_ranks_of(entry.object)):
            self.record.virtual_ranks = count

    def go_on_from(self, step: int, source: str | None) -> None:
        """Note that the run goes on from `step`, which was restored from `source`."""
        self.boundary.go_on_from(step)
        self._source = source
        if self.record is not None:
            self.record.restore(step, source, max(0, self._redone + self._reached - step))

    def mark(self) -> bool:
        """Mark the end of a step; return whether it ends one, see :meth:`Boundary.mark`."""
        latest = None if Recovery._latest is None else Recovery._latest()
        if latest is not self:
            if self._marks and latest is not None and not latest._is_closed and not Recovery._were_told:
                Recovery._were_told = True
                logger.warning(
                    "two Checkpointers mark steps in turns: a failure or a signal brings each back to a step of its "
                    "own; register all that a loop trains with one of them, and let the other only save()"
                )
            Recovery._latest = weakref.ref(self)
        self._marks = True
        return self.boundary.mark()

    def history(self) -> History:
        """Return the history so far."""
        restarts = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
        redone = 0 if self.record is None else self.record.redone
        return History(restarts, redone, self._source if restarts else None)

    def close(self, failing: bool) -> None:
        """Stop rescuing. While an exception is handled that may end this rank, only stop making optimizers wait."""
        self.stops.close()
        self._is_closed = True
        if failing:
            self.boundary.retire()
            return
        if self.record is not None:
            # Before the wait for the others' ends, or ranks that come to their ends together would wait for one
            # another.
            self.record.has_ended = True
        if self._barrier is not None:
            if self.boundary.can_be_saved:
                self._rescue_for(self._barrier.wait_for_end(END_S))
            atexit.unregister(self._leave)
        self.boundary.close()
        if self._forget is not None:
            self._forget()

    def _leave(self) -> None:
        """At this rank's exit, save for lost ranks, because the script may have handled their failure."""
        # A forked child inherits this exit handler, but not the rank's duty.
        if self._barrier is not None and os.getpid() == self._process and not self._rescue.was_called:
            # First, so that ranks which wait for this one, or look for lost ranks, see that it left by itself.
            self._barrier.record.has_exited = True
            self._barrier.wait_for_step(self.boundary.step, COMPLETES_S)
            self._rescue_for(self._barrier.lost_ranks())

    def _rescue_for(self, gone: list[int]) -> None:
        if not gone:
            return
        try:
            self._rescue(CommunicationError(f"{named_ranks(gone)} ended before the training did").because_of(gone))
        except CheckpointError as error:
            logger.error("what this rank had could not be saved: %s", error)


def _open(records: Path | None, world: World, checkpoints: Path) -> tuple[StepRecord | None, StepBarrier | None, str]:
    """Return this rank's record in `records`, the barrier of the ranks, and the problem with that folder."""
    record = None
    try:
        if records is not None:
            records.mkdir(mode=0o700, parents=True, exist_ok=True)
            record = StepRecord(record_path(records, world.rank), make=True, folder=checkpoints)
            timeout = float(os.environ.get(TIMEOUT, "600"))
            return record, StepBarrier(records, world.rank, world.size, timeout, record), ""
    except OSError as error:
        assert records is not None
        if record is not None:
            # Or ranks with a barrier would wait for this one, which never comes to it.
            record.is_alone = True
        return record, None, nothing_is_kept(error, records)
    return None, None, ""
