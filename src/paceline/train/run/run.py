"""The view of a run that callbacks and loggers get: what it has done so far, and the two things they can ask for."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch

from paceline.data import GlobalBatchSampler, GlobalBatchStream
from paceline.ddp import DistributedDataParallel
from paceline.train.run.result import Result
from paceline.train.run.run_state import RunState
from paceline.train.run.stop_request import StopRequest


class Run:
    """A training run, to read; all that a callback can change of it is :meth:`stop` and :meth:`log`."""

    def __init__(
        self,
        model: DistributedDataParallel,
        optimizer: torch.optim.Optimizer,
        position: GlobalBatchSampler | GlobalBatchStream,
        settings: Mapping[str, Any],
        result: Result,
        state: RunState,
    ) -> None:
        self.settings = settings
        """The settings of the :class:`~paceline.train.TrainConfig`, by name."""
        self.is_line_due = False
        """Whether a line of metrics follows the present moment."""
        self.is_evaluation_due = False
        """Whether an evaluation follows the present moment; when a logger is opened, that of a step before it."""
        self.stops = StopRequest(model, state)
        """This rank's request to end the training; call :meth:`stop` to ask."""
        self._model, self._optimizer, self._position = model, optimizer, position
        self._result, self._state = result, state

    @property
    def model(self) -> DistributedDataParallel:
        """The wrapped model; :func:`paceline.unwrap` gives the module."""
        return self._model

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer."""
        return self._optimizer

    @property
    def step(self) -> int:
        """Optimizer steps done, also before a resume."""
        return self._result.steps

    @property
    def epoch(self) -> int:
        """The pass over the data, from 0."""
        return self._position.epoch

    @property
    def metrics(self) -> Mapping[str, float]:
        """The latest value of each metric, by its name in lines of metrics: ``train/loss``, ``lr``, ``eval/loss``, …

        They are reduced over the ranks, so equal on all of them.
        """
        return MappingProxyType(self._state.metrics)

    @property
    def learning_rates(self) -> tuple[float, ...]:
        """The learning rates that the latest step used, one for each parameter group."""
        return self._result.learning_rates

    @property
    def samples(self) -> int:
        """Samples that all ranks have trained on in this process."""
        return self._result.samples

    @property
    def weight(self) -> float:
        """Sum of the weights that the loss function returned on all ranks in this process, such as tokens."""
        return self._result.weight

    @property
    def seconds(self) -> float:
        """Time spent training in this process, without evaluations."""
        return self._result.seconds

    def log(self, values: Mapping[str, float]) -> None:
        """Add `values` to the next line of metrics. Rank 0's are written, so give all ranks' mean, or rank 0's own."""
        self._state.logged.update({name: float(value) for name, value in values.items()})

    def stop(self) -> None:
        """End the training on all ranks after the same step. One rank's request suffices.

        From ``on_start``, ``on_evaluation`` and ``on_save`` it is the step that was just done. From ``on_step`` it is
        the next step (or this one, if an evaluation or a save follows it), in which the other ranks hear of it; with
        one rank as with many, so that the number of ranks changes nothing.
        """
        self.stops.ask()
