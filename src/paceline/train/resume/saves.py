"""The saves of a run: which steps are saved, which is the best, and what the run ends with."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from paceline.checkpoint import Checkpointer
from paceline.core.processes import consensus
from paceline.ddp import DistributedDataParallel
from paceline.train.config import TrainConfig
from paceline.train.result import Result
from paceline.train.resume.run_state import RunState, is_better

logger = logging.getLogger(__name__)


class Saves:
    """Writes the checkpoints of a run that has a folder, on all ranks together.

    Args:
        checkpointer: has everything registered.
        model: its buffers are made equal before each save.
        config: has the folder.
        state: knows the best evaluation so far.
        result: gets the steps whose save failed, and the best one.
    """

    def __init__(
        self,
        checkpointer: Checkpointer,
        model: DistributedDataParallel,
        config: TrainConfig,
        state: RunState,
        result: Result,
    ) -> None:
        self._checkpointer, self._model, self._config = checkpointer, model, config
        self._state, self._result = state, result
        self._best_saved_at = -1  # step of the best evaluation
        self._best_before: float | None = None  # the best value before it
        result.failed_saves = checkpointer.due.failed

    def is_due(self, *, at_epochs_end: bool, is_last: bool) -> bool:
        """Return whether the present step is saved, whatever its evaluation says."""
        self._checkpointer.due.warn_of_failure(self._checkpointer)
        every = self._config.checkpoint_every
        return is_last or (at_epochs_end if every is None else self._result.steps % every == 0)

    def is_best(self) -> bool:
        """Return whether the evaluation of the present step is the best so far, and note it."""
        best = self._state.best
        # One that could not be saved is forgotten, so that the next one that is better than any saved one is saved.
        if self._best_saved_at in self._result.failed_saves:
            best = self._best_before
        value = self._result.metrics[self._config.keep_best or ""]
        if not is_better(value, best, self._config.best or "max"):
            return False
        self._best_saved_at, self._best_before, self._state.best = self._result.steps, best, value
        return True

    def save(self, *, is_last: bool) -> None:
        """Save the present step, with the results of its evaluation if that is done."""
        self._model.sync_buffers()  # rank 0's buffers are saved, and a resumed run uses them on every rank
        is_evaluated = self._state.evaluated_at == self._result.steps
        metadata = dict(self._result.metrics) if is_evaluated else None
        self._checkpointer.due.save(self._checkpointer, self._result.steps, metadata, is_last=is_last)

    def finish(self) -> None:
        """Wait until the last save is durable."""
        self._checkpointer.due.finish(self._checkpointer, is_last=True)

    def find_best(self, names: Sequence[str]) -> None:
        """Find the best checkpoint, and load its objects `names` if the config says so."""
        self._result.best_step = best = self._checkpointer.best()
        if not self._config.load_best_at_end:
            return
        if best is None:
            if consensus.here().rank == 0:
                logger.warning(
                    "load_best_at_end: no checkpoint has a %s that is a number, so the model keeps the weights of the "
                    "last step",
                    self._config.keep_best,
                )
            return
        if best != self._result.steps:
            self._checkpointer.restore(best, only=names)
        self._result.metrics = {name: float(value) for name, value in self._checkpointer.metadata(best).items()}
