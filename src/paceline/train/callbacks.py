"""Callbacks: their protocol, the calls on all ranks, early stopping, and a moving average of the weights."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, Protocol, get_args

import torch
from torch import nn

from paceline.core import consensus
from paceline.core.messages import with_article
from paceline.core.option_rules import choice, share, text, whole_number
from paceline.core.torch_internals import copy_each, mix_each
from paceline.core.unwrapping import unwrap
from paceline.errors import CallbackError, UsageError
from paceline.train.config import Best
from paceline.train.run import Run, is_better

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


class EarlyStopping:
    """Ends the training when a metric has not improved for `patience` evaluations in a row.

    Args:
        monitor: the evaluation's metric.
        mode: whether the smallest or the largest value is best.
        patience: number of evaluations without improvement.

    Raises:
        UsageError: if a value is out of range.
    """

    def __init__(self, monitor: str = "loss", mode: Best = "min", patience: int = 3) -> None:
        self.monitor = text("monitor", monitor).removeprefix("eval/")
        self.mode = choice("mode", mode, get_args(Best))
        self.patience = whole_number("patience", patience)
        self.best: float | None = None
        """The best value; None before the first value that is not NaN."""
        self.wait = 0
        """Number of evaluations since the best value."""

    def on_evaluation(self, run: Run) -> None:
        """Compare the metric with its best value. NaN does not count as an improvement."""
        value = run.metrics[f"eval/{self.monitor}"]
        if is_better(value, self.best, self.mode):
            self.best, self.wait = value, 0
            return
        self.wait += 1
        if self.wait >= self.patience:
            run.stop()

    def state_dict(self) -> dict[str, Any]:
        """Return the best value, the number of evaluations since then, and the metric and mode they belong to."""
        return {"best": self.best, "wait": self.wait, "monitor": self.monitor, "mode": self.mode}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Load a :meth:`state_dict`, unless its `monitor` or `mode` differs."""
        if (saved["monitor"], saved["mode"]) == (self.monitor, self.mode):
            self.best, self.wait = saved["best"], int(saved["wait"])


class ExponentialMovingAverage:
    """Averages the weights over the steps. Evaluations, predictions and the final model use the averages.

    The first step copies the weights. Later steps compute ``average = decay · average + (1 - decay) · weight``,
    bit-identical to ``torch.optim.swa_utils.AveragedModel`` with ``get_ema_multi_avg_fn(decay)``. Buffers are not
    averaged. No communication is needed, because all ranks have the same weights. After Polyak and Juditsky,
    "Acceleration of Stochastic Approximation by Averaging", 1992.

    Args:
        model: the model being trained, wrapped or not.
        decay: weight of the previous average in each step.

    Raises:
        UsageError: if `decay` is not from 0 to 1, or `model` is not a module.
    """

    def __init__(self, model: nn.Module, decay: float = 0.999) -> None:
        if not isinstance(model, nn.Module):
            raise UsageError(
                "ExponentialMovingAverage averages a model's weights, not "
                f"{with_article(type(model).__name__)}; give the model"
            )
        self.decay = share("decay", decay)
        self._parameters = dict(unwrap(model).named_parameters())
        self.averages = {name: parameter.detach().clone() for name, parameter in self._parameters.items()}
        """The averages, by parameter name."""
        self.updates = 0
        """Number of steps that the averages include."""

    @torch.no_grad()
    def on_step(self, run: Run) -> None:
        """Add the weights to the averages."""
        averages = list(self.averages.values())
        weights = [parameter.detach() for parameter in self._parameters.values()]
        if self.updates == 0:
            copy_each(averages, weights)
        else:
            mix_each(averages, weights, 1 - self.decay)
        self.updates += 1

    @contextmanager
    def evaluating(self, run: Run) -> Iterator[None]:
        """Use the averages in the model, and restore the weights afterwards."""
        if self.updates == 0:  # the averages are still the weights from before this run
            yield
            return
        weights = {name: parameter.data for name, parameter in self._parameters.items()}
        self._point_to(self.averages)
        try:
            yield
        finally:
            self._point_to(weights)

    @torch.no_grad()
    def on_end(self, run: Run) -> None:
        """Copy the averages into the model."""
        if self.updates:
            copy_each(list(self._parameters.values()), list(self.averages.values()))

    def state_dict(self) -> dict[str, Any]:
        """Return the averages."""
        return {"updates": self.updates, "averages": dict(self.averages)}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Load averages of the same parameters."""
        with torch.no_grad():
            for name, average in self.averages.items():
                average.copy_(saved["averages"][name])
        self.updates = int(saved["updates"])

    def _point_to(self, tensors: Mapping[str, torch.Tensor]) -> None:
        # A copy would cost time and memory, and would look as if the parameters had changed since the last step.
        for name, parameter in self._parameters.items():
            parameter.data = tensors[name]


class Callbacks:
    """The callbacks of a run; their classes are the same on every rank."""

    def __init__(self, callbacks: Sequence[Any], run: Run) -> None:
        self._all, self._run = callbacks, run
        self._methods = {moment: [callback for callback in callbacks if _has(callback, moment)] for moment in MOMENTS}

    def check_same_on_all_ranks(self) -> None:
        """Check that all ranks have the same callbacks; otherwise, ranks could hang. Collective."""
        classes = consensus.gather(consensus.here(), [type(callback).__qualname__ for callback in self._all])
        for rank, names in enumerate(classes):
            if names != classes[0]:
                raise UsageError(
                    f"rank {rank} has the callbacks {names} but rank 0 has {classes[0]}; give the same on every rank"
                )

    def stateful(self) -> dict[str, Any]:
        """Return the stateful callbacks by their names in checkpoints."""
        # The Checkpointer raises an error for an object with only one of the two methods.
        stateful = [entry for entry in self._all if hasattr(entry, "state_dict") or hasattr(entry, "load_state_dict")]
        return {f"callback_{number}_{_snake(type(entry).__name__)}": entry for number, entry in enumerate(stateful)}

    def with_weights(self) -> list[str]:
        """Return the names of the stateful callbacks that have an ``evaluating`` method."""
        return [name for name, callback in self.stateful().items() if _has(callback, "evaluating")]

    def on_step(self) -> None:
        """Call the callbacks after a step, without communication."""
        for callback in self._methods["on_step"]:
            self._call(callback, "on_step")

    def meet(self, moment: str) -> bool:
        """Call the callbacks at a `moment` outside of steps; return whether any rank asks to stop. Collective."""
        if not self._all:  # true on all ranks or on none
            return False
        failure: CallbackError | UsageError | None = None
        try:
            for callback in self._methods[moment]:
                self._call(callback, moment)
        except (CallbackError, UsageError) as error:
            failure = error
        message, is_usage = None if failure is None else str(failure), isinstance(failure, UsageError)
        outcomes = consensus.gather(consensus.here(), [message, is_usage, self._run.stops.is_asked])
        if failure is not None:
            raise failure
        for message, is_usage, _ in outcomes:
            if message is not None:
                raise UsageError(message) if is_usage else CallbackError(message).because_of(())
        return any(asks for _, _, asks in outcomes)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Enter the context of every callback for an evaluation or prediction."""
        with ExitStack() as stack:
            for callback in self._all:
                if _has(callback, "evaluating"):
                    stack.enter_context(callback.evaluating(self._run))
            yield

    def _call(self, callback: Any, moment: str) -> None:
        try:
            getattr(callback, moment)(self._run)
        except Exception as error:
            place = f"rank {consensus.here().rank}: {type(callback).__qualname__}.{moment}()"
            if isinstance(error, UsageError):  # stays a UsageError, which ends the program with exit code 2
                raise UsageError(f"{place}: {error}") from error
            raise CallbackError(f"{place} raised {type(error).__name__}: {error}; see the error above") from error


def validate_callbacks(callbacks: Any) -> None:
    """Check that `callbacks` is a list of callbacks."""
    if not isinstance(callbacks, list | tuple):
        raise UsageError(
            f"callbacks is {with_article(type(callbacks).__name__)}; give a list of objects with on_step(run), …"
        )
    for callback in callbacks:
        if isinstance(callback, type):
            raise UsageError(f"{callback.__name__} in callbacks is a class; give an object: {callback.__name__}(…)")
        name = type(callback).__qualname__
        methods = [method for method in dir(callback) if method.startswith("on_")]
        unknown = sorted(method for method in methods if method not in MOMENTS and callable(getattr(callback, method)))
        if unknown:
            raise UsageError(f"the callback {name} has an unknown method {unknown[0]}; use {', '.join(MOMENTS)}")
        if not any(_has(callback, moment) for moment in (*MOMENTS, "evaluating")):
            raise UsageError(f"{name} is not a callback; give it at least one of {', '.join(MOMENTS)}")


def _has(callback: Any, method: str) -> bool:
    """Return whether the callback defines `method` itself, not only through the protocol."""
    return callable(getattr(callback, method, None)) and (
        getattr(type(callback), method, None) is not getattr(Callback, method)
    )


def _snake(name: str) -> str:
    # A name in a checkpoint has at most 64 characters.
    return re.sub(r"[^a-z0-9_]", "", re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower())[:48]
