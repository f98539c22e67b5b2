"""Learning rates: scaled with the global batch, warmed up linearly. Pure functions.

The linear rule and the warm-up are those of Goyal et al., "Accurate, Large Minibatch SGD", 2017; the square-root rule
is that of Krizhevsky, "One weird trick for parallelizing convolutional neural networks", 2014.
"""

from __future__ import annotations

import math
from typing import Literal

from paceline.errors import UsageError

LrScaling = Literal["none", "linear", "sqrt"]
Decay = Literal["none", "linear"]


def scaled_lr(lr: float, scaling: LrScaling, batch_size: int, base_batch_size: int | None) -> float:
    """The learning rate for a global batch of `batch_size`, given `lr` for one of `base_batch_size` samples.

    Raises:
        UsageError: for an unknown rule, or a rule without a base batch size.
    """
    if scaling == "none":
        return lr
    if scaling not in ("linear", "sqrt"):
        raise UsageError(f"lr_scaling must be none, linear or sqrt, not {scaling!r}")
    if base_batch_size is None or base_batch_size < 1:
        raise UsageError(
            f"lr_scaling={scaling!r} needs base_batch_size, the global batch for which the learning rate was chosen"
        )
    ratio = batch_size / base_batch_size
    return lr * (ratio if scaling == "linear" else math.sqrt(ratio))


def lr_factor(step: int, warmup_steps: int, decay: Decay, total_steps: int) -> float:
    """What the learning rate is multiplied with in optimizer step `step`, counted from 0.

    Rises in equal parts from 1/`warmup_steps` to 1, then stays, or falls in equal parts towards 0, which it would reach
    one step after the last.
    """
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    if decay == "none":
        return 1.0
    return max(0.0, (total_steps - step) / max(1, total_steps - warmup_steps))
