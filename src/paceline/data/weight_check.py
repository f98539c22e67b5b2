"""Warns about unweighted losses when the ranks' slices differ in length."""

from __future__ import annotations

from paceline.core.state import data_position
from paceline.core.telemetry.users_code import warn

MOST_UNSYNCHRONIZED = 16
"""Optimizer steps without a synchronized backward that show that the model is not in our wrapper."""


class WeightCheck:
    """Follows the steps of a loader whose slices differ in length, and warns once, on rank 0, at the script's loop."""

    def __init__(self, rank: int) -> None:
        self._has_warned = rank != 0
        self._unsynchronized = 0  # optimizer steps since the last synchronized backward
        self.begin_step()

    def begin_step(self) -> None:
        """Forget the batches of a step that a pass left unfinished."""
        self._has_samples = False
        self._synchronizations, self._weights = data_position.synchronizations(), data_position.weights()
        self._steps = data_position.steps()

    def begin_batch(self, *, is_empty: bool) -> None:
        """Note a batch that is about to be handed over."""
        self._has_samples |= not is_empty

    def end_batch(self) -> None:
        """Check the step, if the script has finished one with this batch."""
        if data_position.synchronizations() != self._synchronizations:
            if self._has_samples and data_position.weights() == self._weights:
                self._warn(
                    "slices by cost= or speed= differ in length, and this step's backward was not weighted, so samples "
                    "of short slices count more; put it into model.weight(len(batch)) around a summed loss, or "
                    'model.weight(len(batch), reduction="mean") around a mean'
                )
            self._unsynchronized = 0
            self.begin_step()
        elif data_position.steps() != self._steps:
            self._steps = data_position.steps()
            self._unsynchronized += 1
            if self._unsynchronized == MOST_UNSYNCHRONIZED:
                self._warn(
                    f"a loader with slices by cost= or speed= has seen {MOST_UNSYNCHRONIZED} optimizer steps and no "
                    "backward of a paceline.DistributedDataParallel, so samples of short slices count more; wrap the "
                    "model in it and use its weight(), or scale each loss yourself"
                )

    def _warn(self, message: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            warn(message)
