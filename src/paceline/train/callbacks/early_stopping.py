"""Early stopping."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_args

from paceline.core.option_rules import choice, text, whole_number
from paceline.train.config import Best
from paceline.train.run.run import Run
from paceline.train.run.run_state import is_better


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
