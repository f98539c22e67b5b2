"""A training's saves: one that is not written is said on every rank, and training goes on (decision 0018)."""

from __future__ import annotations

import warnings

from paceline.checkpoint import Checkpointer
from paceline.errors import CheckpointError, CheckpointWarning


class Saves:
    """Saves with `checkpointer`, and appends the steps that were not written to `failed`."""

    def __init__(self, checkpointer: Checkpointer, failed: list[int]) -> None:
        self._checkpointer = checkpointer
        self._failed = failed
        self._begun = -1  # the step that is being written in the background, or was
        self._warned = False  # this rank has said that it failed

    def save(self, step: int, is_last: bool) -> None:
        """Save `step`; warn on every rank if that failed, or if the save in the background before did."""
        self.finish(is_last=False)
        try:
            self._checkpointer.save(step)
        except CheckpointError as error:
            self._lost(step, error, is_last)
        else:
            self._begun, self._warned = step, False

    def look(self) -> None:
        """Warn on rank 0, after any step, as soon as the save in the background has failed."""
        if not self._warned and (error := self._checkpointer.failure) is not None:
            self._warned = True
            self._warn(error, is_last=False)

    def finish(self, is_last: bool = True) -> None:
        """Wait until the save in the background is durable; warn on every rank if it failed."""
        try:
            self._checkpointer.wait()
        except CheckpointError as error:
            self._lost(self._begun, error, is_last)

    def _lost(self, step: int, error: CheckpointError, is_last: bool) -> None:
        self._failed.append(step)
        if not self._warned:
            self._warn(error, is_last)

    def _warn(self, error: CheckpointError, is_last: bool) -> None:
        goes_on = "training has ended with it" if is_last else "training goes on, and the next save tries again"
        warnings.warn(f"{error}; {goes_on}", CheckpointWarning, stacklevel=2)
