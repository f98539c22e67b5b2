"""Callbacks that add learning rates and speeds to the lines of metrics."""

from __future__ import annotations

import torch.distributed as dist

from paceline.core.option_rules import flag, positive
from paceline.errors import UsageError
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


class ThroughputMonitor:
    """Adds the speed since the last line to each line of metrics; evaluations do not count.

    ``samples_per_second`` is over all ranks. With `counts_tokens` there is ``tokens_per_second``, which counts the
    weights that the loss function returns. With `flops` and `peak_flops` there is ``mfu``, the model FLOPs utilization:
    the FLOPs that the model needs per second, divided by those that the ranks' devices can do at most.

    Args:
        counts_tokens: whether the loss function's weights are counts of tokens.
        flops: floating-point operations of forward and backward for one token if `counts_tokens`, else for one sample.
            For a transformer, six times its number of parameters per token is a common estimate.
        peak_flops: most floating-point operations per second of one rank's device, in the precision used.

    Raises:
        UsageError: for a value out of range, or one of `flops` and `peak_flops` without the other.
    """

    def __init__(
        self, *, counts_tokens: bool = False, flops: float | None = None, peak_flops: float | None = None
    ) -> None:
        if (flops is None) != (peak_flops is None):
            raise UsageError("flops and peak_flops make a share together; give both, or none")
        self._counts_tokens = flag("counts_tokens", counts_tokens)
        self._flops = None if flops is None else positive("flops", flops)
        self._peak = None if peak_flops is None else positive("peak_flops", peak_flops)
        self._last = (0, 0.0, 0.0)
        """Samples, weight and seconds at the last line."""

    def on_start(self, run: Run) -> None:
        """Begin to count."""
        self._last = (run.result.samples, run.result.weight, run.result.seconds)

    def on_step(self, run: Run) -> None:
        """Log the speed, if a line is due."""
        if not run.is_line_due:
            return
        now = (run.result.samples, run.result.weight, run.result.seconds)
        samples, weight, seconds = (after - before for after, before in zip(now, self._last, strict=True))
        self._last = now
        if seconds <= 0:
            return
        values = {"samples_per_second": samples / seconds}
        if self._counts_tokens:
            values["tokens_per_second"] = weight / seconds
        if self._flops is not None and self._peak is not None:
            done = self._flops * (weight if self._counts_tokens else samples) / seconds
            values["mfu"] = done / (self._peak * dist.get_world_size(run.model.process_group))
        run.log(values)
