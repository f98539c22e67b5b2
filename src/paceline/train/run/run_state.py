"""State of a run beside its model and data: the latest metrics, the last evaluation, the best one, whether it ended."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.train.run.result import Result


class RunState:
    """Facts that a resumed run has to know; equal on every rank, so that all take the same decisions.

    Args:
        result: gets the metrics of the last evaluation when a state is loaded.
        may_go_on: whether a run that was stopped goes on when its state is loaded.
    """

    def __init__(self, result: Result, may_go_on: bool) -> None:
        self._result, self._may_go_on = result, may_go_on
        self.metrics: dict[str, float] = {}
        """The latest value of each metric, by its name in lines of metrics."""
        self.logged: dict[str, float] = {}
        """Values that callbacks have logged since the last line."""
        self.evaluated_at = 0
        """The step of the last evaluation."""
        self.best: float | None = None
        """The best ``keep_best`` so far; never NaN."""
        self.is_stopped = False
        """Whether all ranks have agreed to end the training before its length."""

    def line(self, values: Mapping[str, float]) -> dict[str, float]:
        """Return the next line of metrics: `values`, and those that callbacks have logged since the last line."""
        line = {**values, **self.logged}
        self.metrics.update(line)
        self.logged = {}
        return line

    def evaluated(self, step: int, metrics: dict[str, float]) -> None:
        """Note the `metrics` of the evaluation at `step`."""
        self.evaluated_at, self._result.metrics = step, metrics
        self.metrics.update({f"eval/{name}": value for name, value in metrics.items()})

    def state_dict(self) -> dict[str, Any]:
        """Return the state."""
        return {
            "metrics": dict(self.metrics),
            "logged": dict(self.logged),
            "evaluated_at": self.evaluated_at,
            "result": dict(self._result.metrics),
            "best": self.best,
            "is_stopped": self.is_stopped,
        }

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Load a saved state."""
        self.metrics, self.logged = dict(saved["metrics"]), dict(saved["logged"])
        self.evaluated_at, self.best = int(saved["evaluated_at"]), saved["best"]
        self._result.metrics = dict(saved["result"])
        self.is_stopped = bool(saved["is_stopped"]) and not self._may_go_on


def is_better(value: float, best: float | None, mode: str, min_delta: float = 0.0) -> bool:
    """Return whether `value` is better than `best` by more than `min_delta`; NaN never is.

    Args:
        mode: ``"max"`` if the largest is best, ``"min"`` if the smallest is.
    """
    if value != value:
        return False
    return best is None or (value > best + min_delta if mode == "max" else value < best - min_delta)
