"""The protocol of callbacks: five moments of a run, of which a callback has those that it needs."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

from paceline.train.run.run import Run

MOMENTS = ("on_start", "on_step", "on_evaluation", "on_save", "on_end")
"""The moments, in the order in which they come."""


class Callback(Protocol):
    """An object that the Trainer calls at named moments, on every rank.

    It need not inherit from this class; any object with at least one of these methods will do. If it also has
    ``state_dict`` and ``load_state_dict``, its state is in the checkpoints: rank 0's, for all ranks. With an attribute
    ``monitor``, the name of an evaluation's metric, a wrong name is refused before work starts.

    An exception in a callback ends the training, with an error that names the callback's class and the rank.
    """

    def on_start(self, run: Run) -> None:
        """Act when the training begins or goes on, with the restored state.

        The model is in training mode; parts that are put into eval mode here, such as a BatchNorm, stay in it.
        """

    def on_step(self, run: Run) -> None:
        """Act after an optimizer step; ``run.metrics`` are those of the latest line.

        Launch no collective here: between this and the end of the step a lost rank could not be made up for.
        """

    def on_evaluation(self, run: Run) -> None:
        """Act after an evaluation, whose results are in ``run.metrics``."""

    def on_save(self, run: Run) -> None:
        """Act after a checkpoint was written, or begun in the background."""

    def on_end(self, run: Run) -> None:
        """Act when the training has come to its end, by its length or by ``run.stop()``; not after an error."""

    def evaluating(self, run: Run) -> AbstractContextManager[None]:
        """Return a context manager that surrounds evaluations and predictions, such as one that puts other weights in.

        The best checkpoint, which ``load_best_at_end`` loads, then gets back the state of this callback, too.
        """
        return nullcontext()
