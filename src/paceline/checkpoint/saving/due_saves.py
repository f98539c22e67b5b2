"""Saves that are due during training: when, and what becomes of them.

A failed one is reported, and training goes on (decision 0018).
"""

from __future__ import annotations

import time
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

from paceline.core.processes import consensus
from paceline.core.telemetry.step_progress import StepRecord
from paceline.core.telemetry.users_code import warn
from paceline.errors import CheckpointError, CheckpointWarning, UsageError


class SaveInterval:
    """Decides whether a step is saved, with the same result on all ranks.

    Rank 0's clock counts. Rank 0 is not asked at every step: each answer includes the number of steps until the next
    question, half of those that fit into the time left.

    Args:
        every: steps, or time; None for never.
    """

    def __init__(self, every: int | timedelta | None) -> None:
        self._every = every
        self._began: tuple[float, int] | None = None
        """When the last save was, and after which step."""
        self._ask = 0
        """The step at which rank 0 is asked next."""

    @property
    def is_set(self) -> bool:
        """Whether steps are saved at all."""
        return self._every is not None

    def check(self) -> None:
        every = self._every
        if not (every is None or (type(every) is int and every > 0) or _is_time(every)):
            raise UsageError(f"every={every!r} is no number of steps above 0, and no timedelta; give one such as 100")

    def is_due(self, step: int) -> bool:
        """Return whether `step`, which was just completed, is saved. Sometimes a collective."""
        if self._every is None:
            return False
        # Every rank counts steps alike, so nobody needs to be asked; clocks differ.
        if isinstance(self._every, int):
            return step % self._every == 0
        if step < self._ask:
            return False
        is_due, self._ask = consensus.decide(consensus.here(), lambda: self._answer(step))
        return bool(is_due)

    def _answer(self, step: int) -> list[Any]:
        assert isinstance(self._every, timedelta)
        now, interval = time.monotonic(), self._every.total_seconds()
        if self._began is None:  # the interval begins with the first step, not with the start of the process
            self._began = now, step
            return [False, step + 1]
        began, first = self._began
        if now - began >= interval:
            self._began = now, step
            return [True, step + max(1, int((step - first) / 2))]
        seconds_a_step = (now - began) / max(1, step - first)
        return [False, step + max(1, int((interval - (now - began)) / seconds_a_step / 2))]


def _is_time(every: Any) -> bool:
    return isinstance(every, timedelta) and every > timedelta(0)


class Saver(Protocol):
    """The part of a Checkpointer that saves."""

    def save(self, step: int, metadata: Any = None) -> Path:
        """Save `step`, or start to save it."""

    def wait(self) -> None:
        """Wait until the started save is durable."""

    @property
    def failure(self) -> CheckpointError | None:
        """The error of the started save, as soon as it has failed."""


class DueSaves:
    """Outcomes of the saves that are due, the same on every rank.

    Args:
        record: this rank's record, which tells the launcher if the job saves nothing; None if there is none.
        is_told: whether this rank warns.
    """

    def __init__(self, record: StepRecord | None, is_told: bool) -> None:
        self.failed: list[int] = []
        """The steps that were due and have not been written."""
        self._record, self._is_told = record, is_told
        self._is_durable = record is not None and record.is_durable
        """Whether anything was saved, also by an earlier start of the job."""
        self._begun = -1
        """The step that is being written in the background, or was."""
        self._cause: object = None
        """Cause of the last failure that was reported; None since a save was written."""

    def save(self, saver: Saver, step: int, metadata: Any = None, is_last: bool = False) -> None:
        """Save `step`; on rank 0 warn if that failed, or if the save in the background before did."""
        self.finish(saver)  # saver.save() would raise the failure of the one before as if it were this one's
        try:
            saver.save(step, metadata)
        except CheckpointError as error:
            self._lost(step, error, is_last)
        else:
            self._begun = step

    def warn_of_failure(self, saver: Saver) -> None:
        """Warn, after any step, as soon as the save in the background has failed."""
        if (error := saver.failure) is not None:
            self._warn(error, is_last=False)

    def finish(self, saver: Saver, is_last: bool = False) -> None:
        """Wait until the save in the background is durable; warn if it failed."""
        try:
            saver.wait()
        except CheckpointError as error:
            self._lost(self._begun, error, is_last)

    def written(self) -> None:
        """Note that a save is durable, whoever asked for it."""
        self._is_durable, self._cause = True, None
        if self._record is not None:
            self._record.is_durable = True

    def check_some(self, folder: Path) -> None:
        """Check that a training that should save steps in `folder` has saved one since its start."""
        if self.failed and not self._is_durable:
            raise CheckpointError(
                f"the training has ended, but nothing of it is saved: none of its {len(self.failed)} saves to {folder} "
                "was written; see the first warning for the cause, remove it and train again"
            )

    def _lost(self, step: int, error: CheckpointError, is_last: bool) -> None:
        self.failed.append(step)
        if self._record is not None:
            self._record.has_lost_save = True
        self._warn(error, is_last)

    def _warn(self, error: CheckpointError, is_last: bool) -> None:
        # The cause is compared and not the text, which names the step, so that a full disk does not warn at every save.
        cause = getattr(error.__cause__, "errno", None) or type(error.__cause__)
        if not self._is_told or (cause == self._cause and not is_last):
            return
        self._cause = cause
        goes_on = "training has ended with it" if is_last else "training goes on, and the next save tries again"
        warn(f"{error}; {goes_on}", CheckpointWarning)
