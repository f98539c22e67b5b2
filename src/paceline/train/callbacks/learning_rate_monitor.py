"""Logs the learning rate of every parameter group."""

from __future__ import annotations

from paceline.train.run.run import Run


class LearningRateMonitor:
    """Adds the learning rates that a step used to each line of metrics, as ``lr/0``, ``lr/1``, …

    A parameter group with an entry ``"name"`` has its name in place of its number. The line's own ``lr`` is the first
    group's.
    """

    def on_step(self, run: Run) -> None:
        """Log the rates, if a line is due."""
        if run.is_line_due:
            names = (str(group.get("name", number)) for number, group in enumerate(run.optimizer.param_groups))
            run.log({f"lr/{name}": rate for name, rate in zip(names, run.result.learning_rates, strict=True)})
