"""The view of a run that callbacks and loggers receive."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch

from paceline.data import GlobalBatchSampler, GlobalBatchStream
from paceline.ddp import DistributedDataParallel
from paceline.train.run.result import Result
from paceline.train.run.run_state import RunState


class StopRequest:
    """This rank's request to end the training, which is saved in checkpoints.

    During a step, the request is sent with the control block of the next synchronized backward pass
    (:meth:`paceline.DistributedDataParallel.ask_to_stop`), without an additional collective. After an evaluation or a
    save, ranks gather all requests. See decision 0053.
    """

    def __init__(self, model: DistributedDataParallel, state: RunState) -> None:
        self._model, self._state = model, state
        self.is_asked = False

    def ask(self) -> None:
        self.is_asked = True
        self._model.ask_to_stop()

    def state_dict(self) -> dict[str, Any]:
        # Only save a request that other ranks may not have received yet.
        return {"is_asked": self.is_asked and not self._state.is_stopped}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        self.load_rank_states([saved])

    def load_rank_states(self, states: Sequence[Mapping[str, Any]]) -> None:
        if any(state["is_asked"] for state in states):
            self.ask()


class Run:
    """A read-only view of a training run, with :meth:`log` and :meth:`stop`."""

    def __init__(
        self,
        model: DistributedDataParallel,
        optimizer: torch.optim.Optimizer,
        position: GlobalBatchSampler | GlobalBatchStream,
        settings: Mapping[str, Any],
        state: RunState,
    ) -> None:
        self.model = model
        """The wrapped model; :func:`paceline.unwrap` gives the module."""
        self.optimizer = optimizer
        self.settings = settings
        """The settings of the :class:`~paceline.train.TrainConfig`, by name."""
        self.is_evaluation_due = False
        """Whether an evaluation follows this step; also set when a logger is opened."""
        self.stops = StopRequest(model, state)
        """This rank's request to end the training; call :meth:`stop`."""
        self._position, self._state = position, state

    @property
    def result(self) -> Result:
        """The result so far: samples, seconds, learning rates, …"""
        return self._state.result

    @property
    def step(self) -> int:
        """Number of optimizer steps, including those before a resume."""
        return self._state.result.steps

    @property
    def epoch(self) -> int:
        """The current pass over the data, counted from 0."""
        return self._position.epoch

    @property
    def metrics(self) -> Mapping[str, float]:
        """The latest value of each metric, by its name in lines of metrics: ``train/loss``, ``lr``, ``eval/loss``, …

        The values are reduced over the ranks, so all ranks have the same values.
        """
        return MappingProxyType(self._state.metrics)

    def log(self, values: Mapping[str, float]) -> None:
        """Add `values` to the next line of metrics. Only rank 0's values are written."""
        self._state.logged.update({name: float(value) for name, value in values.items()})

    def stop(self) -> None:
        """End the training on all ranks after the same step. A request by one rank is enough.

        Called from ``on_start``, ``on_evaluation`` or ``on_save``, this method ends the training after the current
        step. Called from ``on_step``, it ends the training after the next step, which sends the request to the other
        ranks, or after the current step if an evaluation or a save follows. The number of ranks makes no difference.
        """
        self.stops.ask()
