"""The computation of a step: forwards and backwards of its micro-batches, and the optimizer's step, in a precision."""

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
"""The scale of losses below which gradients that overflow are no matter of the scale; the first one is 2**16."""


def autocast(model: nn.Module, precision: str) -> AbstractContextManager[Any]:
    """Return a context in which the operations of `model` run in `precision`."""
    if precision == "fp32":
        return nullcontext()
    return torch.autocast(next(model.parameters()).device.type, _DTYPES[precision])


class TrainingStep:
    """Computes steps of a model; every rank runs it for its own slices.

    Args:
        model: the wrapped model.
        optimizer: steps over its parameters.
        loss: gives a micro-batch's summed loss and weight.
        config: has precision and clipping.
        average: gets the losses.
    """

    scaler: GradScaler | None = None
    """Scales losses, with ``precision="fp16"``. Averaged gradients are equal on all ranks, so all skip the same steps
    and have the same scale."""

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
        self._window: list[tuple[Tensor, float, int]] = []  # losses, weights and numbers of slices since the last step
        self._has_stepped = False  # the optimizer has, since finish() was called
        if config.precision == "fp16":
            self.scaler = GradScaler(model.device.type)
            # GradScaler.step() does not tell whether it has skipped the optimizer's step.
            optimizer.register_step_post_hook(self._note_step)

    def autocast(self) -> AbstractContextManager[Any]:
        """Return a context in which operations run in the config's precision."""
        return autocast(self._model, self._precision)

    def micro_batch(self, batch: Any) -> None:
        """Run forward and backward of one micro-batch; this rank may have no sample in it."""
        if batch is None:
            # The backwards of the other ranks wait for this one, too, which has none of its own.
            if self._model.do_sync:
                self._model.sync_gradients()
            return
        with self.autocast():
            loss, weight = summed_loss(self._loss(self._model, batch))
        if self.scaler is None:
            with self._model.weight(weight):
                loss.backward()
        else:
            # The mean, because the gradients of a sum soon leave the range of fp16.
            count = torch.as_tensor(weight, device=loss.device)
            # A weight may be 0, as where all tokens of a micro-batch are masked, and 0 / 0 is NaN.
            mean = loss / torch.where(count > 0, count, 1)
            with self._model.weight(weight, reduction="mean"):
                self.scaler.scale(mean).backward()
        # A slice that is computed a second time, to compare its bits, counts once.
        if not self._model.is_repeat:
            self._window.append((loss.detach(), weight, self._model.slice_number))

    def finish(self) -> bool:
        """Clip the gradients, and step the optimizer; return False if the scaler has skipped the step."""
        if self.scaler is not None:
            # Before the norm is taken, which the scale would multiply.
            self.scaler.unscale_(self._optimizer)
        if self._clip_norm is not None:
            self._model.check_averaged("clip_grad_norm_()")
            clip_grad_norm_(self._trained_parameters(), self._clip_norm)
        for micro_batch in self._window:  # before the optimizer steps, because a rank's own states are stored there
            self._average.add(*micro_batch)
        self.drop()
        if self.scaler is None:
            self._optimizer.step()
        else:
            self._has_stepped = False
            self.scaler.step(self._optimizer)
            self.scaler.update()
        self._optimizer.zero_grad()
        # Those of parameters that the optimizer does not train, too: they would be added up over the whole run.
        self._model.zero_grad()
        if self.scaler is None or self._has_stepped:
            return True
        if self.scaler.get_scale() < _LEAST_SCALE:
            raise NonFiniteGradient(
                "the gradient holds NaN or Inf however little the loss is scaled, so every step is skipped; look at "
                'the latest batches\' loss, or train with precision="bf16"'
            )
        return False

    def drop(self) -> None:
        """Forget the losses since the last step."""
        self._window.clear()

    def _trained_parameters(self) -> list[nn.Parameter]:
        """Return the model's parameters that the optimizer steps over, in the model's order."""
        # Others may have gradients, which nobody uses and a GradScaler does not unscale: they are not for the norm.
        trained = {id(parameter) for group in self._optimizer.param_groups for parameter in group["params"]}
        return [parameter for parameter in self._model.parameters() if id(parameter) in trained]

    def _note_step(self, *_: object) -> None:
        self._has_stepped = True
