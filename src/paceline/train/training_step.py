"""The computation of a step: forward and backward passes of its micro-batches, and the optimizer step."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler

from paceline.ddp import DistributedDataParallel, clip_grad_norm_
from paceline.errors import NonFiniteGradient
from paceline.train.config import TrainConfig
from paceline.train.metrics.running_means import LossAverage
from paceline.train.validation import summed_loss

Loss = Callable[[nn.Module, Any], tuple[Tensor, float]]
"""``loss(model, batch)`` returns the *summed* loss of a micro-batch, and the number of samples or tokens in the sum."""
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
_LEAST_SCALE = 2.0**-24
"""The smallest useful scale of the loss; GradScaler starts at 2**16."""


def autocast(model: nn.Module, precision: str) -> AbstractContextManager[Any]:
    """Return a context manager that runs operations of `model` in `precision`."""
    if precision == "fp32":
        return nullcontext()
    return torch.autocast(next(model.parameters()).device.type, _DTYPES[precision])


class TrainingStep:
    """Computes the steps of a model on this rank's micro-batches, and adds their losses to `average`."""

    scaler: GradScaler | None = None
    """Scales losses for ``precision="fp16"``. All ranks skip the same steps, because their gradients are equal."""

    def __init__(
        self,
        model: DistributedDataParallel,
        optimizer: torch.optim.Optimizer,
        loss: Loss,
        config: TrainConfig,
        average: LossAverage,
    ) -> None:
        self._model, self._optimizer, self._loss, self._average = model, optimizer, loss, average
        self._clip_norm = config.clip_norm
        self._precision = config.precision
        self._window: list[tuple[Tensor, float, int]] = []  # losses, weights and slice numbers since the last step
        self._has_stepped = False  # whether the optimizer has stepped since finish() was called
        if config.precision == "fp16":
            self.scaler = GradScaler(model.device.type)
            # GradScaler.step() does not return whether it skipped the optimizer's step.
            optimizer.register_step_post_hook(self._note_step)

    def autocast(self) -> AbstractContextManager[Any]:
        """Return a context manager for the config's precision."""
        return autocast(self._model, self._precision)

    def micro_batch(self, batch: Any) -> None:
        """Run the forward and backward pass of one micro-batch. `batch` is None if this rank has no samples in it."""
        if batch is None:
            if self._model.do_sync:  # the backward passes of the other ranks wait for this rank
                self._model.sync_gradients()
            return
        with self.autocast():
            loss, weight = summed_loss(self._loss(self._model, batch))
        if self.scaler is None:
            with self._model.weight(weight):
                loss.backward()
        else:
            # Use the mean, because gradients of a sum easily exceed the range of fp16.
            count = torch.as_tensor(weight, device=loss.device)
            # The weight is 0 if all tokens are masked, and 0 / 0 is NaN.
            mean = loss / torch.where(count > 0, count, 1)
            with self._model.weight(weight, reduction="mean"):
                self.scaler.scale(mean).backward()
        # A slice that is computed again to compare its bits counts only once.
        if not self._model.is_repeat:
            self._window.append((loss.detach(), weight, self._model.slice_number))

    def finish(self) -> bool:
        """Clip the gradients, and step the optimizer; return False if the scaler skipped the step."""
        if self.scaler is not None:
            self.scaler.unscale_(self._optimizer)  # before the norm
        if self._clip_norm is not None:
            self._model.check_averaged("clip_grad_norm_()")
            clip_grad_norm_(self._trained_parameters(), self._clip_norm)
        for micro_batch in self._window:  # before optimizer.step(), which stores per-rank state for rescues
            self._average.add(*micro_batch)
        self.drop()
        if self.scaler is None:
            self._optimizer.step()
        else:
            self._has_stepped = False
            self.scaler.step(self._optimizer)
            self.scaler.update()
        self._optimizer.zero_grad()
        # Also clear gradients outside the optimizer, which would accumulate over the whole run.
        self._model.zero_grad()
        if self.scaler is None or self._has_stepped:
            return True
        if self.scaler.get_scale() < _LEAST_SCALE:
            raise NonFiniteGradient(
                "every step is skipped, because the gradient has NaN or Inf even with the smallest scale of the loss; "
                'check the loss of the latest batches, or train with precision="bf16"'
            )
        return False

    def drop(self) -> None:
        """Forget the losses since the last step."""
        self._window.clear()

    def _trained_parameters(self) -> list[nn.Parameter]:
        """Return the model's parameters in the optimizer, in the model's order."""
        # Gradients of other parameters are unused and still scaled by the GradScaler, so the norm ignores them.
        trained = {id(parameter) for group in self._optimizer.param_groups for parameter in group["params"]}
        return [parameter for parameter in self._model.parameters() if id(parameter) in trained]

    def _note_step(self, *_: object) -> None:
        self._has_stepped = True
