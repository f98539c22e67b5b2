"""Saves that are due during training. A failed save is reported, and training continues (decision 0018)."""

from __future__ import annotations

import math
import time
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, Protocol

from paceline.core import consensus
from paceline.core.stacks import warn
from paceline.core.step_progress import StepRecord
from paceline.core.world import World
from paceline.errors import CheckpointError, CheckpointWarning, UsageError

Every = int | timedelta | Literal["auto"] | None
DAY_S = 86400.0
FAILURES_PER_HOST_DAY = 0.0038
"""Failures of a host that stop a job, per day: 419 in 54 days on 16,384 GPUs, 8 to a host (Grattafiori et al., "The
Llama 3 Herd of Models", 2024, table 5). The InfiniteHBD trace (2025) has the same rate, if failures that begin at the
same time count once."""
SHORTEST_S, LONGEST_S, MOST_SAVING = 60.0, 3600.0, 0.02
"""Bounds of automatic intervals in seconds. An interval is longer than the upper bound only if saves would otherwise
take more than a share ``MOST_SAVING`` of the time. There is an upper bound because not all failures are the host's."""


def young_interval(save_s: float, mtbf_s: float) -> float:
    """Return the seconds between saves that lose the least time, if failures are rare.

    J. W. Young, "A first order approximation to the optimum checkpoint interval", CACM 17 (1974).
    """
    return math.sqrt(2 * save_s * mtbf_s)


def automatic_interval(save_s: float | None, hosts: int) -> float:
    """Return the seconds between saves on `hosts` hosts, if a save stops the job for `save_s`; None if unknown."""
    if save_s is None:
        return SHORTEST_S  # soon, to measure the first save
    best = young_interval(save_s, DAY_S / (hosts * FAILURES_PER_HOST_DAY))
    return min(max(best, SHORTEST_S), max(LONGEST_S, save_s / MOST_SAVING))


class SaveInterval:
    """Decides which steps are saved, by number or by time on rank 0's clock.

    Rank 0 does not decide at every step. Each decision also schedules the next decision, after half of the steps that
    fit into the remaining time.
    """

    def __init__(self, every: Every) -> None:
        self._every = every
        self.save_s: float | None = None
        """Seconds for which the last due save stopped the job; None before the first."""
        self._began: tuple[float, int] | None = None
        """Time and step of the last save."""
        self._ask = 0
        """The step of rank 0's next decision."""

    def check(self) -> None:
        every = self._every
        is_time = isinstance(every, timedelta) and every > timedelta(0)
        if not (every is None or every == "auto" or (type(every) is int and every > 0) or is_time):
            raise UsageError(
                f"every={every!r} must be a positive number of steps, a positive timedelta or 'auto'; give a value "
                "such as 100"
            )

    def is_due(self, step: int, is_apart: bool = False) -> bool:
        """Return whether to save `step`, which was just completed.

        For a time interval, this can be a collective, except between the outer steps of islands (`is_apart`).
        """
        if self._every is None:
            return False
        if isinstance(self._every, int):
            return step % self._every == 0
        if step < self._ask or is_apart:
            return False
        world = consensus.here()
        is_due, self._ask = consensus.decide(world, lambda: self._answer(step, world))
        return bool(is_due)

    def _answer(self, step: int, world: World) -> list[Any]:
        now, every, hosts = time.monotonic(), self._every, math.ceil(world.size / world.local_size)
        interval = every.total_seconds() if isinstance(every, timedelta) else automatic_interval(self.save_s, hosts)
        if self._began is None:  # the first interval begins with the first step
            self._began = now, step
            return [False, step + 1]
        began, first = self._began
        if now - began >= interval:
            self._began = now, step
            return [True, step + max(1, int((step - first) / 2))]
        seconds_a_step = (now - began) / max(1, step - first)
        return [False, step + max(1, int((interval - (now - began)) / seconds_a_step / 2))]


class Saver(Protocol):
    """The part of a Checkpointer that saves."""

    def save(self, step: int, metadata: Any = None) -> Path:
        """Save `step`, or start to save it."""

    def wait(self) -> None:
        """Wait until the started save is durable."""


class DueSaves:
    """Makes due saves and tracks their outcomes, which are the same on every rank.

    Args:
        record: this rank's record; the launcher reads it to find out whether anything was saved.
        warns: whether this rank warns about failures.
        interval: receives how long each save stopped the job.
    """

    def __init__(self, record: StepRecord | None, warns: bool, interval: SaveInterval) -> None:
        self.failed: list[int] = []
        """The steps that were due and could not be saved."""
        self._record, self._warns, self._interval = record, warns, interval
        self._is_durable = record is not None and record.is_durable
        """Whether anything was saved, by this or an earlier start of the job."""
        self._begun = -1
        """The latest step that was written in the background."""
        self._cause: object = None
        """Cause of the last reported failure; None after a successful save."""

    def save(self, saver: Saver, step: int, metadata: Any = None, is_last: bool = False) -> None:
        """Save `step`. Rank 0 warns if this save or the previous background save failed."""
        began = time.monotonic()
        self.finish(saver)  # otherwise saver.save() would raise the failure of the previous save
        try:
            saver.save(step, metadata)
        except CheckpointError as error:
            self._lost(step, error, is_last)
        else:
            self._begun, self._interval.save_s = step, time.monotonic() - began

    def finish(self, saver: Saver, is_last: bool = False) -> None:
        """Wait for the background save; rank 0 warns if it failed."""
        try:
            saver.wait()
        except CheckpointError as error:
            self._lost(self._begun, error, is_last)

    def written(self) -> None:
        """Record that a save is durable."""
        self._is_durable, self._cause = True, None
        if self._record is not None:
            self._record.is_durable = True

    def check_some(self, folder: Path) -> None:
        """Raise an error at the end of training if all saves to `folder` have failed."""
        if self.failed and not self._is_durable:
            raise CheckpointError(
                f"training has ended, but none of it was saved: all {len(self.failed)} saves to {folder} failed; "
                "fix the cause given in the first warning, and train again"
            )

    def _lost(self, step: int, error: CheckpointError, is_last: bool) -> None:
        self.failed.append(step)
        if self._record is not None:
            self._record.has_lost_save = True
        # Compare the cause, not the text, which contains the step: a full disk should not warn at every save.
        cause = getattr(error.__cause__, "errno", None) or type(error.__cause__)
        if not self._warns or (cause == self._cause and not is_last):
            return
        self._cause = cause
        consequence = "this was the last save" if is_last else "training continues, and the next save tries again"
        warn(f"{error}; {consequence}", CheckpointWarning)
