"""Calls a Trainer's callbacks, and makes ranks agree on their errors and stop requests."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from paceline.core.output.wording import with_article
from paceline.core.processes import consensus
from paceline.errors import CallbackError, UsageError
from paceline.train.callbacks.protocol import MOMENTS, Callback
from paceline.train.run.run import Run


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
