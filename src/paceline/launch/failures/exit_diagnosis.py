"""What ranks were last doing before they ended, according to their black boxes."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

from paceline.core.telemetry.black_box import Snapshot, snapshot_of
from paceline.core.telemetry.job_directory import JobFolder
from paceline.launch.failures.rank_state import State, state_of
from paceline.launch.failures.root_cause import End


class LastMoments:
    """The states of the ranks of one start when the first one failed."""

    def __init__(self, boxes: JobFolder) -> None:
        self._boxes = boxes
        self._seen: dict[int, Snapshot | None] = {}
        """Each rank's black box at the first failure; empty before that failure."""
        self._seen_at = 0.0
        """Time of the first failure, on ``time.monotonic``."""

    def note_failure(self) -> None:
        """Read all boxes at the first failure of a start, before other ranks fail or are terminated."""
        if not self._seen:
            self._seen_at = time.monotonic()
            self._seen = {rank: snapshot_of(self._boxes.path, rank) for rank in range(self._boxes.note.nproc)}

    def with_diagnosis(self, ends: Sequence[End]) -> list[End]:
        """Return `ends` with each rank's state added. Call this after the ranks have exited."""
        return [replace(end, state=self._state(end)) for end in ends]

    def _state(self, end: End) -> State | None:
        if not any(self._seen.values()):  # no rank has opened its box
            return None
        now, epoch = time.monotonic(), time.time()
        if end.stopped:  # its box now shows the termination, so use the earlier copy
            return state_of(self._seen[end.rank], self._seen_at)
        has_report = end.record is not None or end.leaving is not None
        when = end.when if has_report else end.at
        box = snapshot_of(self._boxes.path, end.rank)
        return state_of(box, min(now - (epoch - when), now), raised=has_report or end.code >= 0)
