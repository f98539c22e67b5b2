"""Saves the checkpoints of a run, and keeps track of the best checkpoint."""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Sequence

from paceline.checkpoint import Checkpointer
from paceline.core import consensus
from paceline.core.step_progress import RESTARTS, job_folder
from paceline.ddp import DistributedDataParallel
from paceline.train.run import RunState, is_better

logger = logging.getLogger(__name__)
_numbers = itertools.count()
"""Counts the Trainers in this process that have no Checkpointer."""


def is_restart() -> bool:
    """Return whether the launcher has restarted the ranks after a failure."""
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"


def in_memory() -> Checkpointer | None:
    """Return a Checkpointer that rescues steps in memory if the launcher restarts failed ranks; otherwise None."""
    job = job_folder()
    if job is None or not int(os.environ.get(RESTARTS, "0")):
        return None
    return Checkpointer(job / "checkpoints" / str(next(_numbers)))


class Saves:
    """Writes the checkpoints of a run, on all ranks together.

    Args:
        checkpointer: the Checkpointer with everything registered.
        model: the model, whose buffers are made equal before each save.
        state: has the best value; its result receives the best step and the failed saves.
    """

    def __init__(self, checkpointer: Checkpointer, model: DistributedDataParallel, state: RunState) -> None:
        self._checkpointer, self._model, self._state, self._result = checkpointer, model, state, state.result
        self.keeps_best = checkpointer.keep_best is not None
        self._metric, self._mode = checkpointer.keep_best or ("", "max")
        self._result.failed_saves = checkpointer.due.failed

    def is_best(self) -> bool:
        """Return whether the current step's evaluation is the best so far; if so, record it."""
        value, rule = self._result.metrics[self._metric], f"{self._mode} {self._metric}"
        if not is_better(value, self._state.best.get(rule), self._mode):
            return False
        self._state.best = {rule: value}
        return True

    def save(self, *, is_last: bool) -> None:
        """Save the current step, together with the results of its evaluation, if any."""
        self._model.sync_buffers()  # rank 0's buffers are saved, and a resumed run uses them on every rank
        is_evaluated = self._state.evaluated_at == self._result.steps
        metadata = dict(self._result.metrics) if is_evaluated else None
        self._checkpointer.due.save(self._checkpointer, self._result.steps, metadata, is_last=is_last)

    def finish(self, best: Sequence[str] = ()) -> None:
        """Wait until the last save is durable, find the best save, and restore the objects named in `best` from it."""
        self._checkpointer.due.finish(self._checkpointer, is_last=True)
        if not self.keeps_best:
            return
        self._result.best_step = step = self._checkpointer.best()
        if step is not None and best:
            if step != self._result.steps:
                self._checkpointer.restore(step, only=best)
            self._result.metrics = {name: float(value) for name, value in self._checkpointer.metadata(step).items()}
        elif best and consensus.here().rank == 0:
            logger.warning(
                "load_best_at_end: no checkpoint has a %s that is a number, so the model keeps the weights of the last "
                "step",
                self._metric,
            )
