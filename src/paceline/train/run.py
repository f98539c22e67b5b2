"""A training run: the view of it that callbacks and loggers receive, its result, and its state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch

from paceline.checkpoint.recovery import History
from paceline.data import GlobalBatchSampler, GlobalBatchStream
from paceline.ddp import DistributedDataParallel


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

        With :class:`~paceline.optim.LocalSGD` or :class:`~paceline.optim.DiLoCo`, requests are sent only after outer
        steps.
        """
        self.stops.ask()


@dataclass
class Result:
    """The outcome of a training run."""

    steps: int = 0
    """Optimizer steps since the beginning of the run, including those before a resume."""
    resumed_from_step: int | None = None
    seconds: float = 0.0
    """Time spent on training in this process, excluding evaluations."""
    samples: int = 0
    """Samples that all ranks together have trained on since this process started."""
    weight: float = 0.0
    """Sum of the weights that the loss function has returned on the model's ranks since this process started."""
    learning_rates: tuple[float, ...] = ()
    """Learning rates of the latest step, one per parameter group."""
    exposed_seconds: float = 0.0
    """Part of ``seconds`` that this rank spent waiting for communication: for gradients at the end of backward passes,
    and for other islands."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Metrics of the last evaluation, or of the best checkpoint with ``load_best_at_end``."""
    best_step: int | None = None
    """Step of the best checkpoint according to ``keep_best``; set when the training ends."""
    history: History | None = None
    """Restarts after failures, and repeated steps; None without a Checkpointer."""
    failed_saves: list[int] = field(default_factory=list)
    """Steps whose checkpoint could not be written, for example because of a full disk."""

    @property
    def samples_per_second(self) -> float:
        """Samples per second, over all ranks."""
        return self.samples / self.seconds if self.seconds else 0.0

    @property
    def exposed_share(self) -> float:
        """Share of the training time spent waiting for communication, from 0 to 1."""
        return self.exposed_seconds / self.seconds if self.seconds else 0.0


class RunState:
    """State that a resumed run needs apart from its model and data; it is the same on every rank."""

    def __init__(self, may_continue: bool) -> None:
        self._may_continue = may_continue
        """Whether a stopped run continues when its state is loaded."""
        self.result = Result()
        self.metrics: dict[str, float] = {}
        """The latest value of each metric, by its name in lines of metrics."""
        self.logged: dict[str, float] = {}
        """Values that callbacks have logged since the last line."""
        self.evaluated_at = -1
        """The step of the last evaluation; -1 before the first."""
        self.best: dict[str, float] = {}
        """The best value, never NaN, by the rule of ``keep_best``, such as ``"min loss"``; a changed rule has none."""
        self.is_stopped = False
        """Whether all ranks have agreed to end the training early."""

    def line(self, values: Mapping[str, float]) -> dict[str, float]:
        """Return the next line of metrics: `values` and the values that callbacks have logged since the last line."""
        line = {**values, **self.logged}
        self.metrics.update(line)
        self.logged = {}
        return line

    def evaluated(self, metrics: dict[str, float]) -> None:
        self.evaluated_at, self.result.metrics = self.result.steps, metrics
        self.metrics.update({f"eval/{name}": value for name, value in metrics.items()})

    def state_dict(self) -> dict[str, Any]:
        names = ("metrics", "logged", "evaluated_at", "best", "is_stopped")
        return {**{name: getattr(self, name) for name in names}, "result": self.result.metrics}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        self.metrics, self.logged = dict(saved["metrics"]), dict(saved["logged"])
        self.evaluated_at, self.best = int(saved["evaluated_at"]), dict(saved["best"])
        self.result.metrics = dict(saved["result"])
        self.is_stopped = bool(saved["is_stopped"]) and not self._may_continue


class StopRequest:
    """This rank's request to end the training, which is saved in checkpoints.

    During a step, the request is sent with the control block of the next synchronized backward pass
    (:meth:`paceline.DistributedDataParallel.ask_to_stop`), without an additional collective. After an evaluation or a
    save, ranks gather all requests; islands also do so after outer steps. See decision 0053.
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


def is_better(value: float, best: float | None, mode: str) -> bool:
    """Return whether `value` is better than `best`; False for NaN."""
    if value != value:
        return False
    return best is None or (value > best if mode == "max" else value < best)
