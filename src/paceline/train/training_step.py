"""The computation of a step: forward and backward passes of its micro-batches, and the optimizer step."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp import GradScaler

from paceline.ddp import DistributedDataParallel
from paceline.errors import NonFiniteGradient
from paceline.optim.local_sgd import IslandOptimizer
from paceline.train.config import TrainConfig
from paceline.train.metrics import LossAverage
from paceline.train.validation import summed_loss

Loss = Callable[[nn.Module, Any], tuple[Tensor, float]]
"""``loss(model, batch)`` returns the *summed* loss of a micro-batch, and the number of samples or tokens in the sum."""
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
_LEAST_SCALE = 2.0**-24
"""The smallest useful scale of the loss."""


class TrainingStep:
    """Computes the steps of a model on this rank's micro-batches, and adds their losses to `average`.

    `batch_size` is the number of samples in a global batch.
    """

    scaler: GradScaler | None = None
    """Scales losses for ``precision="fp16"``. All ranks skip the same steps, because their gradients are equal.

    Islands have different gradients, so a step that only some of them skip counts on all (``IslandOptimizer``).
    """

    def __init__(
        self,
        model: DistributedDataParallel,
        optimizer: torch.optim.Optimizer,
        loss: Loss,
        config: TrainConfig,
        average: LossAverage,
        batch_size: int,
    ) -> None:
        self._model, self._optimizer, self._loss, self._average = model, optimizer, loss, average
        self._clip_norm = config.clip_norm
        self._precision = config.precision
        self._window: list[tuple[Tensor, float, int]] = []  # losses, weights and slice numbers since the last step
        self._has_stepped = False  # whether the optimizer has stepped since finish() was called
        if config.precision == "fp16":
            # GradScaler's default, 2**16, is for a mean. Summing the loss multiplies the gradients by the number of
            # items. It is rounded up to a power of two, because dividing by a power of two is exact.
            items = math.ceil(batch_size / (model.virtual_ranks or dist.get_world_size()))
            self.scaler = GradScaler(model.device.type, init_scale=2.0 ** (16 - (items - 1).bit_length()))
            # GradScaler.step() does not return whether it skipped the optimizer's step.
            optimizer.register_step_post_hook(self._note_step)

    def autocast(self) -> AbstractContextManager[Any]:
        """Return a context manager that runs operations of the model in the config's precision."""
        if self._precision == "fp32":
            return nullcontext()
        return torch.autocast(self._model.device.type, _DTYPES[self._precision])

    def micro_batch(self, batch: Any, *, is_empty: bool = False) -> None:
        """Run the forward and backward pass of one micro-batch; if `is_empty`, this rank has no samples in it."""
        if batch is None:
            if self._model.do_sync:  # the backward passes of the other ranks wait for this rank
                self._model.sync_gradients()
            return
        with self.autocast():
            loss, weight = summed_loss(self._loss(self._model, batch))
        with self._model.weight(weight):
            # The scale is the gradient of the loss, not a factor, so that a mean is recognized in every precision.
            loss.backward(None if self.scaler is None else self.scaler.scale(torch.ones_like(loss)))
        if not is_empty:
            self._window.append((loss.detach(), weight, self._model.slice_number))

    def finish(self) -> bool:
        """Clip the gradients, and step the optimizer; return False if the scaler skipped the step."""
        if self.scaler is not None:
            self.scaler.unscale_(self._optimizer)  # before the norm
        if self._clip_norm is not None:
            nn.utils.clip_grad_norm_(self._trained_parameters(), self._clip_norm)
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
        if self.scaler is None or (self._has_stepped and not isinstance(self._optimizer, IslandOptimizer)):
            return True
        if self.scaler.get_scale() < _LEAST_SCALE:
            raise NonFiniteGradient(
                "every step is skipped, because the gradient has NaN or Inf even with the smallest scale of the loss; "
                'check the loss of the latest batches, or train with precision="bf16"'
            )
        return self._has_stepped

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
