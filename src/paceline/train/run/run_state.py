"""The state of a run apart from its model and data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.train.run.result import Result


class RunState:
    """State that a resumed run needs; it is the same on every rank."""

    def __init__(self, may_go_on: bool) -> None:
        self._may_go_on = may_go_on
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
        self.is_stopped = bool(saved["is_stopped"]) and not self._may_go_on


def is_better(value: float, best: float | None, mode: str) -> bool:
    """Return whether `value` is better than `best`; False for NaN."""
    if value != value:
        return False
    return best is None or (value > best if mode == "max" else value < best)
