"""Learning rates: scaling with the global batch, linear warm-up, and decay. All steps are optimizer steps.

    rule        rate for a batch of k · base samples    source
    none        lr
    linear      lr · k                                  Goyal et al., "Accurate, Large Minibatch SGD", 2017; for SGD
    sqrt        lr · √k                                 Malladi et al., "On the SDEs and Scaling Rules for Adaptive
                                                        Gradient Algorithms", 2022; for Adam

    decay       factor after the warm-up, for t from 0 to 1
    none        1
    linear      1 - t
    cosine      (1 + cos(π · t)) / 2                    Loshchilov and Hutter, "SGDR", 2017
    wsd         1, then 1 - t over the last steps       warm-up, stable, decay: Hu et al., "MiniCPM", 2024

With ``decay_to``, a factor f becomes ``decay_to + (1 - decay_to) · f``. The warm-up follows Goyal et al.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any, Literal, get_args

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, ReduceLROnPlateau

from paceline.core.messages import with_article
from paceline.core.option_rules import choice
from paceline.errors import UsageError
from paceline.train.config import TrainConfig

LrScaling = Literal["none", "linear", "sqrt"]
Decay = Literal["none", "linear", "cosine", "wsd"]
"""``tools/recipes/configs.py`` repeats these choices for ``--decay``, because it must not import torch."""


def scaled_lr(lr: float, scaling: LrScaling, batch_size: int, base_batch_size: int | None) -> float:
    """Return the learning rate for a global batch of `batch_size`, given `lr` for a batch of `base_batch_size` samples.

    Raises:
        UsageError: if the rule is unknown, or if it needs `base_batch_size` and none is given.
    """
    if choice("lr_scaling", scaling, get_args(LrScaling)) == "none":
        return lr
    if base_batch_size is None or base_batch_size < 1:
        raise UsageError(
            f"lr_scaling={scaling!r} needs base_batch_size; give the global batch size that lr was tuned for"
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

    The factor rises linearly from 1/`warmup_steps` to 1. Then it stays at 1, or falls toward `decay_to`, which it would
    reach one step after the last of `total_steps`. With ``"wsd"`` it falls only in the last `decay_steps`, by default a
    tenth of all steps. To use it as a schedule in the Trainer::

        LambdaLR(optimizer, partial(lr_factor, warmup_steps=100, decay="cosine", total_steps=1000))

    Raises:
        UsageError: if the decay is unknown, or if it needs `total_steps` and none is given.
    """
    choice("decay", decay, get_args(Decay))
    if decay != "none" and total_steps is None:
        raise UsageError(f"decay={decay!r} needs total_steps; give the number of steps of the training")
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


def validate_schedule(scheduler: Any, optimizer: Optimizer) -> None:
    """Check that `scheduler` is a scheduler of `optimizer`, and that None does not mean a forgotten scheduler."""
    if scheduler is None:
        # Schedulers mark both the groups and optimizer.step; loading a state_dict marks only the groups.
        marked = any("initial_lr" in group for group in optimizer.param_groups)
        if marked and hasattr(optimizer.step, "_wrapped_by_lr_sched"):
            raise UsageError(
                "the optimizer has a learning-rate scheduler, which the Trainer would not step; give it as "
                "Trainer(…, scheduler=…), or create a new optimizer"
            )
    elif not isinstance(scheduler, LRScheduler):
        raise UsageError(
            f"scheduler is {with_article(type(scheduler).__qualname__)}; give a scheduler of torch.optim.lr_scheduler"
        )
    elif scheduler.optimizer is not optimizer:
        raise UsageError("the scheduler belongs to a different optimizer; create it from the Trainer's optimizer")


def settings_of(scheduler: LRScheduler | None, config: TrainConfig) -> dict[str, Any]:
    """Return a scheduler's class and its plain values before its first step, to be compared when a run is resumed.

    Arguments of ``functools.partial`` functions are a separate setting, because a resumed run may change them.
    """
    if scheduler is None:
        return {}
    plain = (bool, int, float, str)
    values: dict[str, Any] = {
        name: list(value) if isinstance(value, list | tuple) else value
        for name, value in scheduler.state_dict().items()
        if isinstance(value, plain) or (isinstance(value, list | tuple) and all(isinstance(v, plain) for v in value))
    }
    for name in ("base_lrs", "_last_lr"):  # values of the optimizer, which are compared separately
        values.pop(name, None)
    if isinstance(scheduler, ReduceLROnPlateau):
        values |= {"monitor": config.monitor, "evaluate_every": config.evaluate_every}
    settings: dict[str, Any] = {"scheduler": {"class": type(scheduler).__qualname__, **values}}
    if isinstance(scheduler, LambdaLR):
        arguments = [dict(factor.keywords) for factor in scheduler.lr_lambdas if isinstance(factor, partial)]
        settings["schedule"] = arguments[0] if len(arguments) == 1 else arguments
    return settings
