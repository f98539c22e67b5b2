"""The view of a run that callbacks and loggers get: what it has done so far, and the two things they can ask for."""

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
    """Whether this rank has asked to end the training. It is each rank's own, and in its checkpoints.

    During a step the request travels in what ranks exchange in the next synchronized backward anyway
    (:meth:`paceline.DistributedDataParallel.ask_to_stop`), so it costs nothing. After an evaluation or a save, which
    are rare, ranks ask each other. Decision 0053 says why.
    """

    def __init__(self, model: DistributedDataParallel, state: RunState) -> None:
        self._model, self._state = model, state
        self.is_asked = False

    def ask(self) -> None:
        self.is_asked = True
        self._model.ask_to_stop()

    def state_dict(self) -> dict[str, Any]:
        # Only a request that the other ranks may not know yet.
        return {"is_asked": self.is_asked and not self._state.is_stopped}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        self.load_rank_states([saved])

    def load_rank_states(self, states: Sequence[Mapping[str, Any]]) -> None:
        if any(state["is_asked"] for state in states):
            self.ask()


class Run:
    """A training run, to read; all that a callback can change of it is :meth:`stop` and :meth:`log`."""

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
        self.is_line_due = False
        """Whether a line of metrics follows the present moment."""
        self.is_evaluation_due = False
        """Whether an evaluation follows the present moment; when a logger is opened, that of a step before it."""
        self.stops = StopRequest(model, state)
        """This rank's request to end the training; call :meth:`stop` to ask."""
        self._position, self._state = position, state

    @property
    def result(self) -> Result:
        """The result so far: samples, seconds, learning rates, …"""
        return self._state.result

    @property
    def step(self) -> int:
        """Optimizer steps done, also before a resume."""
        return self._state.result.steps

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
