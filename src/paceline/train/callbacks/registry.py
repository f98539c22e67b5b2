"""Calls a Trainer's callbacks, names those that raise, and lets ranks agree on errors and requests to stop."""

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
    """The callbacks of a run, which are of the same classes on every rank.

    Args:
        callbacks: checked by :func:`validate_callbacks`.
        run: their view.
    """

    def __init__(self, callbacks: Sequence[Any], run: Run) -> None:
        self._all, self._run = callbacks, run
        self._methods = {moment: [each for each in callbacks if _has(each, moment)] for moment in MOMENTS}

    def check_same_on_all_ranks(self) -> None:
        """Refuse different callbacks on different ranks, which would wait for each other; all ranks call this."""
        told = consensus.gather(consensus.here(), [type(each).__qualname__ for each in self._all])
        for rank, names in enumerate(told):
            if names != told[0]:
                raise UsageError(
                    f"rank {rank} has the callbacks {names} but rank 0 has {told[0]}; give the same on every rank"
                )

    def stateful(self) -> dict[str, Any]:
        """Return the callbacks with a state, by the names under which they are saved."""
        # One that has only one of the two methods is refused by the Checkpointer.
        found = [each for each in self._all if hasattr(each, "state_dict") or hasattr(each, "load_state_dict")]
        return {f"callback_{number}_{_snake(type(each).__name__)}": each for number, each in enumerate(found)}

    def with_weights(self) -> list[str]:
        """Return the names of the stateful callbacks that change what an evaluation sees."""
        return [name for name, callback in self.stateful().items() if _has(callback, "evaluating")]

    def on_step(self) -> None:
        """Call them after a step, without any communication."""
        for callback in self._methods["on_step"]:
            self._call(callback, "on_step")

    def meet(self, moment: str) -> bool:
        """Call them at a `moment` that ranks share outside of steps; return whether a rank has asked to stop."""
        if not self._all:  # the same on every rank
            return False
        failure: CallbackError | UsageError | None = None
        try:
            for callback in self._methods[moment]:
                self._call(callback, moment)
        except (CallbackError, UsageError) as error:
            failure = error
        message, is_usage = None if failure is None else str(failure), isinstance(failure, UsageError)
        told = consensus.gather(consensus.here(), [message, is_usage, self._run.stops.is_asked])
        if failure is not None:
            raise failure
        for message, is_usage, _ in told:
            if message is not None:
                raise UsageError(message) if is_usage else CallbackError(message).because_of(())
        return any(asks for _, _, asks in told)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Surround an evaluation, or a prediction."""
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
            # It stays one, as a user's mistake ends the program with exit code 2.
            if isinstance(error, UsageError):
                raise UsageError(f"{place}: {error}") from error
            raise CallbackError(f"{place} raised {type(error).__name__}: {error}; see the error before") from error


def validate_callbacks(callbacks: Any) -> None:
    """Check that `callbacks` is a list of callbacks, and those with a state can have it saved."""
    if not isinstance(callbacks, list | tuple):
        raise UsageError(
            f"callbacks is {with_article(type(callbacks).__name__)}; give a list of objects with on_step(run), …"
        )
    for callback in callbacks:
        if isinstance(callback, type):
            raise UsageError(f"{callback.__name__} in callbacks is a class; give an object: {callback.__name__}(…)")
        name = type(callback).__qualname__
        methods = [each for each in dir(callback) if each.startswith("on_") and callable(getattr(callback, each))]
        unknown = sorted(set(methods).difference(MOMENTS))
        if unknown:
            raise UsageError(
                f"the callback {name} has {unknown[0]}, which nobody calls; there are {', '.join(MOMENTS)}"
            )
        if not any(_has(callback, moment) for moment in (*MOMENTS, "evaluating")):
            raise UsageError(f"{name} is no callback; give it at least one of {', '.join(MOMENTS)}")


def _has(callback: Any, method: str) -> bool:
    """Return whether the callback has a `method` of its own, not the empty one that it inherits from the protocol."""
    return callable(getattr(callback, method, None)) and (
        getattr(type(callback), method, None) is not getattr(Callback, method)
    )


def _snake(name: str) -> str:
    # A name in a checkpoint has at most 64 characters.
    return re.sub(r"[^a-z0-9_]", "", re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower())[:48]
