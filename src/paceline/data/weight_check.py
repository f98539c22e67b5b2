"""Warns about unweighted losses when the ranks' slices differ in length."""

from __future__ import annotations

from paceline.core.state import data_position
from paceline.core.telemetry.users_code import warn

MOST_UNSYNCHRONIZED = 16
"""After this many optimizer steps without a synchronized backward pass, the model must be outside our wrapper."""


class WeightCheck:
    """Watches the steps of a loader whose slices differ in length, and warns once, on rank 0, at the script's loop."""

    def __init__(self, rank: int) -> None:
        self._has_warned = rank != 0
        self._unsynchronized = 0  # optimizer steps since the last synchronized backward pass
        self.begin_step()

    def begin_step(self) -> None:
        """Forget the batches of a step that a pass left unfinished."""
        self._has_samples = False
        self._synchronizations, self._weights = data_position.taken.synchronizations, data_position.taken.weights
        self._steps = data_position.steps()

    def begin_batch(self, *, is_empty: bool) -> None:
        """Record a batch that is about to be handed over."""
        self._has_samples |= not is_empty

    def end_batch(self) -> None:
        """Check the step, if this batch completed one."""
        if data_position.taken.synchronizations != self._synchronizations:
            if self._has_samples and data_position.taken.weights == self._weights:
                self._warn(
                    "slices by cost= or speed= differ in length, and this step's backward was not weighted, so samples "
                    "in short slices count more; compute a summed loss inside model.weight(len(batch))"
                )
            self._unsynchronized = 0
            self.begin_step()
        elif data_position.steps() != self._steps:
            self._steps = data_position.steps()
            self._unsynchronized += 1
            if self._unsynchronized == MOST_UNSYNCHRONIZED:
                self._warn(
                    f"a loader with slices by cost= or speed= has seen {MOST_UNSYNCHRONIZED} optimizer steps and no "
                    "backward of a paceline.DistributedDataParallel, so samples in short slices count more; wrap the "
                    "model in it and use its weight(), or scale each loss yourself"
                )

    def _warn(self, message: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            warn(message)
