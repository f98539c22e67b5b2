"""Learning rates: scaled with the global batch, warmed up linearly, decayed. All steps are optimizer steps.

    rule        rate for a batch of k · base samples    source
    none        lr                                      for those who tune it for each batch size
    linear      lr · k                                  Goyal et al., "Accurate, Large Minibatch SGD", 2017; for SGD
    sqrt        lr · √k                                 Krizhevsky, "One weird trick for parallelizing convolutional
                                                        neural networks", 2014; Malladi et al., "On the SDEs and Scaling
                                                        Rules for Adaptive Gradient Algorithms", 2022; for Adam

    decay       factor after the warm-up, where the share t of its steps goes from 0 to 1
    none        1
    linear      1 - t
    cosine      (1 + cos(π · t)) / 2                    Loshchilov and Hutter, "SGDR", 2017
    wsd         1, then 1 - t over the last steps       warm-up, stable, decay: Hu et al., "MiniCPM", 2024

With ``decay_to``, a factor f becomes ``decay_to + (1 - decay_to) · f``. The warm-up is that of Goyal et al.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, get_args
from weakref import WeakSet

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, ReduceLROnPlateau

from paceline.core.option_rules import choice
from paceline.data import GlobalBatchSampler, GlobalBatchStream
from paceline.errors import UsageError
from paceline.train.config import Decay, LrScaling, TrainConfig


def scaled_lr(lr: float, scaling: LrScaling, batch_size: int, base_batch_size: int | None) -> float:
    """Return the learning rate for a global batch of `batch_size`, given `lr` for one of `base_batch_size` samples.

    Raises:
        UsageError: for an unknown rule, or a rule without a base batch size.
    """
    if choice("lr_scaling", scaling, get_args(LrScaling)) == "none":
        return lr
    if base_batch_size is None or base_batch_size < 1:
        raise UsageError(
            f"lr_scaling={scaling!r} needs base_batch_size, the global batch for which the learning rate was chosen"
        )
    ratio = batch_size / base_batch_size
    return lr * (ratio if scaling == "linear" else math.sqrt(ratio))


def lr_factor(
    step: int,
    warmup_steps: int = 0,
    decay: Decay = "none",
    total_steps: int | None = None,
    decay_steps: int | None = None,
    decay_to: float = 0.0,
) -> float:
    """Return the factor of the learning rate in optimizer step `step`, counted from 0.

    It rises in equal parts from 1/`warmup_steps` to 1. Then it stays there, or falls towards `decay_to`, which it would
    reach one step after the last of `total_steps`; only a decay needs those. With ``"wsd"`` it falls in the last
    `decay_steps`, a tenth of all by default.

    Raises:
        UsageError: for an unknown decay.
    """
    choice("decay", decay, get_args(Decay))
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    if decay == "none" or total_steps is None:
        return 1.0
    start = warmup_steps
    if decay == "wsd":
        start = max(start, total_steps - (max(1, total_steps // 10) if decay_steps is None else decay_steps))
    share = min(1.0, max(0, step - start) / max(1, total_steps - start))
    factor = (1 + math.cos(math.pi * share)) / 2 if decay == "cosine" else 1 - share
    return decay_to + (1 - decay_to) * factor


def steps_of(lengths: Sequence[int], accumulate: int) -> int:
    """Return the optimizer steps in epochs of `lengths` batches; the last window of each epoch may be short."""
    return sum(-(-length // accumulate) for length in lengths)


def lengths_of(sampler: GlobalBatchSampler | GlobalBatchStream, config: TrainConfig) -> list[int] | None:
    """Return the batches in each epoch; None if nobody needs them, and the user's order or the stream decides them."""
    if config.epochs is None or isinstance(sampler, GlobalBatchStream):
        return None
    if not sampler.varies:
        return [sampler.length] * config.epochs
    return None if config.decay == "none" else [sampler.length_of(epoch) for epoch in range(config.epochs)]


class _Constant(LambdaLR):
    """A schedule that never changes learning rates, so other code may change them during training."""

    def get_lr(self) -> list[Any]:
        return [group["lr"] for group in self.optimizer.param_groups]


_scheduled: WeakSet[Optimizer] = WeakSet()
"""The optimizers that a Trainer's own schedule is on, whose ``initial_lr`` is not that of a user's scheduler."""


def validate_unscheduled(optimizer: Optimizer) -> None:
    """Check that `optimizer` has no scheduler that the Trainer does not know.

    Raises:
        UsageError: if it has one; says how to pass it.
    """
    # torch marks the groups, and also the optimizer's step. Only the groups' mark is saved and loaded.
    marked = any("initial_lr" in group for group in optimizer.param_groups)
    if marked and hasattr(optimizer.step, "_wrapped_by_lr_sched") and optimizer not in _scheduled:
        raise UsageError(
            "a learning-rate scheduler was made for the optimizer, which the Trainer does not step; give it as "
            "Trainer(…, scheduler=…), or, if it has done its part, make the optimizer anew"
        )


def own_schedule(optimizer: Optimizer, config: TrainConfig, total_steps: int | None) -> LRScheduler:
    """Return a schedule that starts from the current learning rates; without warm-up and decay it changes nothing."""
    for group in optimizer.param_groups:
        group.pop("initial_lr", None)  # set by an earlier Trainer; torch would start from it
    _scheduled.add(optimizer)
    # A LambdaLR would put back the initial rates in every step, against a user who changes them.
    if not config.warmup_steps and config.decay == "none":
        return _Constant(optimizer, lambda _: 1.0)
    names = ("warmup_steps", "decay", "decay_steps", "decay_to")
    factor = partial(lr_factor, total_steps=total_steps, **{name: getattr(config, name) for name in names})
    return LambdaLR(optimizer, factor)


def settings_of(scheduler: LRScheduler, config: TrainConfig) -> dict[str, Any]:
    """Return the class of a user's scheduler and its plain values before its first step, for a resume to compare."""
    plain = (bool, int, float, str)
    values: dict[str, Any] = {
        name: list(value) if isinstance(value, list | tuple) else value
        for name, value in scheduler.state_dict().items()
        if isinstance(value, plain) or (isinstance(value, list | tuple) and all(isinstance(v, plain) for v in value))
    }
    for name in ("base_lrs", "_last_lr"):  # belong to the optimizer, which is compared separately
        values.pop(name, None)
    if isinstance(scheduler, ReduceLROnPlateau):
        values |= {"monitor": config.monitor, "evaluate_every": config.evaluate_every}
    return {"class": type(scheduler).__qualname__, **values}


def validate_length(lengths: Sequence[int] | None, epoch: int, now: int | None) -> None:
    """Check that an epoch of `now` batches has the length that the schedule was made for.

    Raises:
        UsageError: if it was made for another length; names both.
    """
    if lengths is not None and now != lengths[epoch]:
        raise UsageError(
            f"the order of epoch {epoch} has {now} batches now but had {lengths[epoch]} when the Trainer asked how "
            "long the learning rate may fall; let order depend on the epoch alone, or give a scheduler in place of "
            "decay"
        )
