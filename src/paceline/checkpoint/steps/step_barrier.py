"""The barrier before an optimizer step: no rank passes before every rank has stored its own states for that step.

Decision 0033 explains the design.
"""

from __future__ import annotations

import itertools
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from paceline.checkpoint.captures import Capture
from paceline.checkpoint.steps.rank_states import OwnStatesFiles
from paceline.core.process_status import is_running
from paceline.core.processes.missing_ranks import REMEDY, named_ranks
from paceline.core.telemetry.spans import COLLECTIVE, recorder
from paceline.core.telemetry.step_progress import StepRecord, record_path
from paceline.errors import CommunicationError

_SPINS = 100
"""Number of polls before this rank starts to sleep between polls."""
_SLEEP_S = 50e-6
_LOOK_S = 0.005
"""Interval between checks that absent ranks are still running."""


class StepBarrier:
    """This rank's part of the barrier, in the folder of the job's records.

    Args:
        folder: the folder of records, which all ranks share.
        rank: this rank.
        size: the world size.
        timeout: longest time to wait for a rank, in seconds.
        record: this rank's record in the folder; a new one by default.
    """

    def __init__(self, folder: Path, rank: int, size: int, timeout: float, record: StepRecord | None = None) -> None:
        self.folder, self.size, self.rank, self._timeout = folder, size, rank, timeout
        self._states = OwnStatesFiles(states_path(folder, rank))
        self.record = record or StepRecord(record_path(folder, rank), make=True)
        self._completed_at: float | None = None
        """Time of the last step."""
        self._others: dict[int, StepRecord] = {}
        """Step records of the other ranks, opened when they are first needed."""

    def prepare(self, step: int, objects: Sequence[Capture], buffers: Sequence[torch.Tensor], wish: int = 0) -> int:
        """Store this rank's own states at `step`, and wait until every rank has done so.

        Args:
            step: the step that all ranks are about to take.
            objects: the state of each object registered with ``per_rank``.
            buffers: buffers of registered modules.
            wish: this rank's requests to stop, as bits.

        Returns:
            The requests of all ranks, combined with *or*; the same on all ranks.
        """
        self._states.write(step, objects, buffers)
        self.record.prepare(step, wish)
        waiting = self._absent(step, range(self.size))
        if waiting:
            with recorder.span(COLLECTIVE):
                self._wait(step, waiting)
        for other in self._others.values():
            wish |= other.wish(step)
        return wish

    @property
    def is_left(self) -> bool:
        """Whether another rank has stopped using the barrier."""
        return any(other.is_alone for other in self._others.values())

    def complete(self, step: int, objects: Sequence[Capture], buffers: Sequence[torch.Tensor]) -> None:
        """Store this rank's own states at the end of `step`."""
        # Update the record last, because it announces to the other ranks that the states are stored.
        self._states.write(step, objects, buffers)
        now = time.monotonic()
        self.record.complete(step, 0.0 if self._completed_at is None else now - self._completed_at)
        self._completed_at = now

    def completed(self, rank: int) -> int:
        """Return the last step that `rank` has completed; -1 for none."""
        record = self.record if rank == self.rank else self._other(rank)
        return -1 if record is None else record.completed

    def lost_ranks(self) -> list[int]:
        """Return the ranks that ended before their training did, except ranks that left on purpose."""
        others = self._opened().items()
        return [rank for rank, other in others if not other.has_left and not is_running(other.pid)]

    @property
    def is_over(self) -> bool:
        """Whether every rank has finished its training or left."""
        return all(other.has_left for other in self._opened().values())

    def wait_for_step(self, step: int, seconds: float) -> None:
        """Wait until every running rank has completed `step`."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if all(other.completed >= step or not is_running(other.pid) for other in self._opened().values()):
                return
            time.sleep(_LOOK_S)

    def wait_for_end(self, seconds: float) -> list[int]:
        """Wait until every rank has finished its training or is gone; return the ranks that are gone."""
        deadline = time.monotonic() + seconds
        while not (gone := self.lost_ranks()) and time.monotonic() < deadline:
            if self.is_over:
                break
            time.sleep(_LOOK_S)
        return gone

    def _wait(self, step: int, waiting: list[int]) -> None:
        began = looked = time.monotonic()
        for turn in itertools.count():
            waiting = self._absent(step, waiting)
            if not waiting:
                return
            if turn < _SPINS:
                # With more ranks than cores, the absent rank may need this core.
                os.sched_yield()
                continue
            time.sleep(_SLEEP_S)
            now = time.monotonic()
            if now - looked < _LOOK_S:
                continue
            looked = now
            gone = [rank for rank in waiting if rank in self._others and not is_running(self._others[rank].pid)]
            if gone and self._absent(step, gone):  # a rank may have arrived just before it ended
                raise CommunicationError(
                    f"rank {self.rank}: {named_ranks(gone)} ended before optimizer step {step}, so no rank takes it; "
                    "look for the error of that rank"
                ).because_of(gone)
            if now - began > self._timeout:
                raise CommunicationError(
                    f"rank {self.rank}: {named_ranks(waiting)} did not reach optimizer step {step} within "
                    f"{self._timeout:g} s; {REMEDY}"
                ).because_of(waiting)

    def _absent(self, step: int, ranks: Sequence[int]) -> list[int]:
        return [rank for rank in ranks if rank != self.rank and self._prepared(rank) < step]

    def _prepared(self, rank: int) -> int:
        record = self._other(rank)
        if record is None:
            return -1
        # A rank that steps alone never returns to the barrier.
        return sys.maxsize if record.is_alone else record.prepared

    def _opened(self) -> dict[int, StepRecord]:
        """Return the records of the other ranks that have opened their Checkpointers."""
        others = {rank: self._other(rank) for rank in range(self.size) if rank != self.rank}
        return {rank: other for rank, other in others.items() if other is not None}

    def _other(self, rank: int) -> StepRecord | None:
        """Return the record of another rank, or None before it has opened its Checkpointer."""
        if rank not in self._others:
            try:
                self._others[rank] = StepRecord(record_path(self.folder, rank))
            except (OSError, ValueError):  # not yet written
                return None
        return self._others[rank]


def states_path(folder: Path, rank: int) -> Path:
    """Return the common prefix of the paths of `rank`'s state files."""
    return folder / f"rank-{rank}.states"
