"""The pace of ranks whose slices are unlike: each measures its own, and all agree on the next cuts.

    a step ──► its seconds without waiting, for a sample ──► every 16 steps: medians of all ranks ──► the same decision

What is decided, and from which medians, is :func:`.split.speeds.decide`.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Iterator
from statistics import median
from typing import Any

from paceline.core.processes.consensus import gather, here
from paceline.core.state import data_position
from paceline.core.state.waited import seconds_waited
from paceline.core.telemetry.users_code import warn
from paceline.data.position import Position
from paceline.data.split.speeds import Cuts, decide, shares_by_speed
from paceline.errors import UsageError

logger = logging.getLogger(__name__)
EVERY = 16
"""Steps between two exchanges of measurements, and so between two changes of the cuts."""


class Pace:
    """Follows the steps of one loader.

    Args:
        progress: the loader's position.
        cuts: its cuts, which :meth:`end_batch` changes; None where slices are unlike by their cost alone.
    """

    issued: int
    """Number of the next batch whose slices are not decided yet; batches before it may have been fetched ahead."""
    _work: float
    """Samples (or cost) of this rank in the step under way."""
    _step_seconds: float
    """Seconds of this step so far, without waiting for other ranks."""
    _since: float
    """Time up to which it is counted."""
    _waited: float
    """Seconds that the process had waited for other ranks by then."""
    _synchronizations: int
    """Synchronized backwards before this step."""
    _weights: int
    """Weighted micro-batches before it."""
    _steps: int
    """Optimizer steps and synchronized backwards that have been seen."""

    def __init__(self, progress: Position, cuts: Cuts | None) -> None:
        self._progress = progress
        self._measured = cuts if cuts is not None and cuts.is_measured else None  # cuts that measurements change
        self._seconds: list[float] = []  # for a sample, in each step since the last exchange; NaN where it had none
        self._unsynchronized = 0  # optimizer steps since the last synchronized backward
        self._has_warned = False
        self.begin_pass()
        if self._measured is not None and (size := here().size) != progress.world_size:
            raise UsageError(
                f"speed='measured' is measured by the {size} ranks of the process group, but the sampler is for "
                f"{progress.world_size}; give a speed for each rank"
            )

    def begin_pass(self) -> None:
        """Begin a pass: a step that the last one did not end is not measured."""
        self.issued = self._progress.position
        self._planned: dict[int, float] = {}  # the work in this rank's slices of batches that were not handed over
        self._begin_step()

    def plan(self, number: int, work: float) -> None:
        """Note the `work` in this rank's slice of batch `number`, which is fetched from now on."""
        self.issued = number + 1
        self._planned[number] = work

    def begin_batch(self, number: int, *, is_empty: bool, is_fetched_ahead: bool) -> None:
        """Count the time from here on, where another process has fetched the batch; it is about to be handed over."""
        work = self._planned.pop(number, 0.0)
        if not is_empty:  # a stream plans a whole batch, and finds at its end that the last one is too short for all
            self._work += work
        if is_fetched_ahead:
            self._since = time.perf_counter()

    def end_batch(self) -> None:
        """Count the time with the batch, which the script has finished; all ranks, where speeds are measured."""
        now, waited = time.perf_counter(), seconds_waited()
        self._step_seconds += now - self._since - (waited - self._waited)
        self._since, self._waited = now, waited
        if data_position.synchronizations() != self._synchronizations:
            if self._work and data_position.weights() == self._weights:
                self._warn_of_weights()
            self._end_step()
        elif data_position.steps() != self._steps:
            self._steps = data_position.steps()
            self._unsynchronized += 1
            if self._unsynchronized == EVERY:
                self._check_wrapper()

    def _begin_step(self) -> None:
        self._work = self._step_seconds = 0.0
        self._since, self._waited = time.perf_counter(), seconds_waited()
        self._synchronizations, self._weights = data_position.synchronizations(), data_position.weights()
        self._steps = data_position.steps()

    def _end_step(self) -> None:
        # Another thread that takes batches ahead of the steps has no time to measure, and must not meet other ranks.
        if self._measured is not None and threading.current_thread() is threading.main_thread():
            self._seconds.append(self._step_seconds / self._work if self._work else math.nan)
            if len(self._seconds) == EVERY:
                self._exchange(self._measured)
        self._unsynchronized = 0
        self._begin_step()

    def _exchange(self, cuts: Cuts) -> None:
        """Exchange medians with all ranks, and change the cuts from the first step on that none has begun to fetch."""
        progress, window = self._progress, self._progress.steps_batches
        known = [seconds for seconds in self._seconds if not math.isnan(seconds)]
        self._seconds.clear()
        answers = gather(here(), [median(known) if known else None, -(-self.issued // window) * window])
        number = max(start for _, start in answers)
        speeds = cuts.at(progress.epoch, number)
        decision = decide(speeds, [seconds for seconds, _ in answers], progress.batch_size)
        if decision is None:
            return
        cuts.change(progress.epoch, number, decision[0])
        if progress.rank == 0:
            shares = ", ".join(map(str, shares_by_speed(progress.batch_size, decision[0])))
            logger.info(
                "from batch %d of epoch %d on, ranks get slices by speed: %s samples; steps %.2f times as fast",
                *(number, progress.epoch, shares, decision[1]),
            )

    def _warn_of_weights(self) -> None:
        self._warn(
            "slices by cost= or speed= differ in length, and this step's backward was not weighted, so samples of "
            "short slices count more; put it into model.weight(len(batch)) around a summed loss, or "
            'model.weight(len(batch), reduction="mean") around a mean'
        )

    def _check_wrapper(self) -> None:
        """Warn of optimizer steps without a backward of our wrapper; raise, where it is needed for measuring."""
        seen = f"has seen {EVERY} optimizer steps and no backward of a paceline.DistributedDataParallel"
        if self._measured is not None:
            raise UsageError(
                f"rank {self._progress.rank}: speed='measured' {seen}, which knows how long ranks wait; wrap the model "
                "in it, or give a speed for each rank"
            )
        self._warn(
            f"a loader with slices by cost= or speed=, which differ in length, {seen}; another wrapper's mean counts "
            "samples of short slices more, so wrap the model in ours and use its weight(), or scale each loss yourself"
        )

    def _warn(self, message: str) -> None:
        """Warn, once and on rank 0 alone, at the script's loop."""
        if not self._has_warned and self._progress.rank == 0:
            self._has_warned = True
            warn(message)


class Tickets:
    """The sampler of torch's loader: yields the tickets for the rest of the pass, and tells the pace of them."""

    def __init__(self, progress: Position, pace: Pace | None) -> None:
        self.progress, self.pace = progress, pace

    def __iter__(self) -> Iterator[Any]:
        for ticket in self.progress.tickets():
            if self.pace is not None:
                self.pace.plan(ticket.number, ticket.work)
            yield ticket
