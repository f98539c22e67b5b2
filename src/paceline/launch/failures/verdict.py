"""The verdict on a start of the ranks that has failed: whether they are started again, and if not, why.

Restarts are counted only without progress: a start that completes a step for the first time resets the count. All of
this is a function of plain values.

Decision 0047 says why.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

LIMIT = 3
"""Starts without progress, by default."""
EARLY_S = 120.0
"""A start that fails within this time, with unknown steps, counts as one that has not begun to train. If a rank was
killed, nothing was lost; if a rank raised an error, it is the user's mistake."""


class Verdict(Enum):
    """Consequence of a failure."""

    RESTART = "all ranks are started again"
    MISTAKE = "an exception before the first step is the script's own"
    REPEATED = "the same error in the same place ended the start before"
    OVER = "there is nothing to go on from, or the training has ended"
    IN_VAIN = "as many starts as the user allows have gained nothing"


@dataclass(frozen=True)
class Cause:
    """The cause of a failed start, used to predict whether the next one would end in the same way."""

    error: str | None = None
    """The first rank's own exception: a text that is equal for the same error; None if the rank ended otherwise."""
    may_pass: bool = False
    """Whether that exception is of the host, a device or the network, and may not come again."""
    has_optimizer: bool = True
    """Whether the rank that raised it may have held an optimizer."""
    is_kill: bool = False
    """Whether the first rank was killed."""
    step: int | None = None
    """The job's last step that it had completed, from its black box; None if unknown."""
    rank: int | None = None
    """The rank that failed first, if its place on the host may be to blame: for the end of its process, or an error of
    its device, not for an exception of the script, nor for one of several ranks of which nobody knows who is wrong."""


@dataclass(frozen=True)
class Reached:
    """Progress of a start of the ranks with one checkpoint folder."""

    key: str
    """Key of the folder."""
    restored: int
    """The step from which it resumed."""
    completed: int
    """The last step that a rank completed; the step from which it resumed if there is none."""
    redone: int = 0
    source: str | None = None
    rescued: int | None = None
    """The newest step in memory."""
    on_disk: int | None = None
    """The newest step in the checkpoint folder."""
    has_begun: bool = False
    """Whether a rank has marked where it begins, or a step: then all steps are known."""
    has_saved: bool = False
    """Whether this or an earlier start of the job has saved a step there."""
    has_ended: bool = False
    """Whether all ranks had come to the end of their training."""
    pace: float = 0.0
    """Seconds that the last step took."""
    is_unsaved: bool = False
    """Whether steps should have been saved on disk, but no start has saved one."""
    virtual_ranks: int = 0
    """Number of virtual ranks of what is trained; 0 for none."""
    is_alone: bool = False
    """Whether a rank has stepped without the others, so that no rank can save the last step for all."""

    @property
    def is_rescued(self) -> bool:
        """Whether the last step is where the next start finds it."""
        return self.completed in (self.rescued, self.on_disk)

    @property
    def goes_on(self) -> str:
        """Text that says where the next start resumes, which depends on the same folders."""
        found, on_disk = max(self.rescued or 0, self.on_disk or 0), self.on_disk or 0
        if not self.completed:
            return ""
        place = "on disk" if found == on_disk else "in memory"
        where = f" from step {found}, which is {place}" if found else " from the beginning"
        return where if found >= self.completed else f"{where}, as nobody could save step {self.completed}"


@dataclass(frozen=True)
class Failure:
    """A start that failed."""

    cause: Cause
    reached: Sequence[Reached] = ()
    """For each checkpoint folder that a rank has opened."""
    seconds: float = 0.0
    """Duration of the start."""

    @property
    def completed(self) -> dict[str, int]:
        """The last step completed, by the key of the checkpoint folder."""
        return {each.key: each.completed for each in self.reached}

    @property
    def error(self) -> tuple[object, ...] | None:
        """Key that is equal for the same error at the same step; None if a repetition cannot be recognized.

        Without a known step, a transient error counts as a new error each time.
        """
        cause = self.cause
        if cause.error is None or (cause.may_pass and not self.reached and cause.step is None):
            return None
        steps: tuple[object, ...] = tuple(sorted(self.completed.items())) or (cause.step,)
        return (cause.error, *steps)

    @property
    def has_trained(self) -> bool:
        """Whether the ranks are known to have completed a step, or to have resumed from one."""
        return any(each.completed or each.has_saved for each in self.reached) or bool(self.cause.step)

    @property
    def is_untrained(self) -> bool:
        """Whether the ranks are known, or may be taken, to have completed no step.

        Steps are known where a Checkpointer marks them. Black boxes count those of optimizers, which a loop need not
        have. Of other scripts it is known only whether there is an optimizer.
        """
        if self.has_trained:
            return False
        if any(each.has_begun for each in self.reached):
            return True
        is_told = bool(self.reached) or self.cause.step is not None or not self.cause.has_optimizer
        return is_told and self.seconds < EARLY_S


@dataclass(frozen=True)
class Past:
    """The failed starts of a job until now."""

    best: Mapping[str, int] = field(default_factory=dict)
    """The last step that any start has completed, by the key of the checkpoint folder."""
    in_vain: int = 0
    """Failures since a start made progress."""
    error: tuple[object, ...] | None = None
    """:attr:`Failure.error` of the last one."""
    has_trained: bool = False
    """Whether a start is known to have completed a step, or to have gone on from one."""

    def with_one_more(self, failure: Failure) -> Past:
        """Return the past including `failure`."""
        completed = failure.completed
        is_progress = any(step > self.best.get(key, 0) for key, step in completed.items())
        best = {**self.best, **{key: max(step, self.best.get(key, 0)) for key, step in completed.items()}}
        has_trained = self.has_trained or failure.has_trained
        return Past(best, 0 if is_progress else self.in_vain + 1, failure.error, has_trained)


def verdict(failure: Failure, past: Past, limit: int | None) -> Verdict:
    """Return the consequence of `failure`.

    Args:
        failure: the failure of the last start.
        past: the failed starts before it.
        limit: restarts without progress, one after another; None for :data:`LIMIT` if the ranks tell how far they are,
            or were killed before they could, else none.
    """
    cause, reached = failure.cause, failure.reached
    if cause.error is not None and not cause.may_pass and failure.is_untrained and not past.has_trained:
        return Verdict.MISTAKE
    if failure.error is not None and failure.error == past.error:
        return Verdict.REPEATED
    # A start that did not come to a Checkpointer's making says nothing; one before it may have.
    is_early_kill = cause.is_kill and not cause.step and failure.seconds < EARLY_S
    is_over = all(each.has_ended for each in reached) if reached else not (past.best or is_early_kill)
    if is_over and (limit is None or any(each.is_unsaved for each in reached)):
        return Verdict.OVER
    allowed = LIMIT if limit is None else limit
    return Verdict.RESTART if past.with_one_more(failure).in_vain <= allowed and allowed else Verdict.IN_VAIN
