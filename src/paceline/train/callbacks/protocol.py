"""The protocol of callbacks."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

from paceline.train.run.run import Run

MOMENTS = ("on_start", "on_step", "on_evaluation", "on_save", "on_end")
"""The methods of a callback, in call order."""


class Callback(Protocol):
    """An object that the Trainer calls on every rank.

    A callback needs at least one of these methods; it does not have to inherit from this class. If it has
    ``state_dict`` and ``load_state_dict``, checkpoints contain rank 0's state for all ranks. If it has an attribute
    ``monitor``, which names a metric of the evaluation, the Trainer checks the name before it starts.

    An exception in a callback ends the training with an error that names the callback's class and the rank.
    """

    def on_start(self, run: Run) -> None:
        """Called when the training starts or resumes, after the state is restored.

        The model is in training mode. Parts that you put into eval mode here, such as a BatchNorm, stay in eval mode.
        """

    def on_step(self, run: Run) -> None:
        """Called after an optimizer step; ``run.metrics`` has the values of the latest line.

        Do not launch collectives here. If a rank died during a collective, the step could not be rescued.
        """

    def on_evaluation(self, run: Run) -> None:
        """Called after an evaluation; its results are in ``run.metrics``."""

    def on_save(self, run: Run) -> None:
        """Called after a checkpoint has been written, or after a background save has started."""

    def on_end(self, run: Run) -> None:
        """Called when the training is complete or was stopped by ``run.stop()``; not after an error."""

    def evaluating(self, run: Run) -> AbstractContextManager[None]:
        """Return a context manager that surrounds evaluations and predictions, for example to use different weights.

        If a callback has this method, ``load_best_at_end`` also loads its state.
        """
        return nullcontext()
