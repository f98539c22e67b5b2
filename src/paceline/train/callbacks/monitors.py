"""Callbacks that log learning rates and speed."""

from __future__ import annotations

from paceline.core.option_rules import flag
from paceline.train.run.run import Run


class LearningRateMonitor:
    """Logs each parameter group's learning rate as ``lr/0``, ``lr/1``, …, or as ``lr/NAME`` if it has a ``"name"``."""

    def on_step(self, run: Run) -> None:
        """Log the rates if a line of metrics is due."""
        if run.is_line_due:
            names = (str(group.get("name", number)) for number, group in enumerate(run.optimizer.param_groups))
            run.log({f"lr/{name}": rate for name, rate in zip(names, run.result.learning_rates, strict=True)})


class ThroughputMonitor:
    """Logs ``samples_per_second`` over all ranks since the last line, excluding evaluations.

    Args:
        counts_tokens: whether to log ``tokens_per_second`` as well; the loss function must return the number of tokens.
    """

    def __init__(self, *, counts_tokens: bool = False) -> None:
        self._counts_tokens = flag("counts_tokens", counts_tokens)
        self._last = (0, 0.0, 0.0)
        """Totals of samples, weight and seconds at the last line."""

    def on_start(self, run: Run) -> None:
        """Start counting."""
        self._last = (run.result.samples, run.result.weight, run.result.seconds)

    def on_step(self, run: Run) -> None:
        """Log the speed if a line of metrics is due."""
        if not run.is_line_due:
            return
        totals = (run.result.samples, run.result.weight, run.result.seconds)
        samples, weight, seconds = (total - last for total, last in zip(totals, self._last, strict=True))
        self._last = totals
        if seconds > 0:
            run.log({"samples_per_second": samples / seconds})
            if self._counts_tokens:
                run.log({"tokens_per_second": weight / seconds})
