"""An exponential moving average of the weights.

Polyak and Juditsky, "Acceleration of Stochastic Approximation by Averaging", 1992; the exponential form follows
``torch.optim.swa_utils``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from paceline.core.option_rules import share
from paceline.core.output.wording import with_article
from paceline.core.state.unwrapping import unwrap
from paceline.core.torch_internals.tensors import copy_each, mix_each
from paceline.errors import UsageError
from paceline.train.run.run import Run


class ExponentialMovingAverage:
    """Averages the weights over the steps. Evaluations, predictions and the final model use the averages.

    The first step copies the weights. Later steps compute ``average = decay · average + (1 - decay) · weight``,
    bit-identical to ``torch.optim.swa_utils.AveragedModel`` with ``get_ema_multi_avg_fn(decay)``. Buffers are not
    averaged. No communication is needed, because all ranks have the same weights.

    Args:
        model: the model being trained, wrapped or not.
        decay: weight of the previous average in each step.

    Raises:
        UsageError: if `decay` is not from 0 to 1, or `model` is not a module.
    """

    def __init__(self, model: nn.Module, decay: float = 0.999) -> None:
        if not isinstance(model, nn.Module):
            raise UsageError(
                "ExponentialMovingAverage averages a model's weights, not "
                f"{with_article(type(model).__name__)}; give the model"
            )
        self.decay = share("decay", decay)
        self._parameters = dict(unwrap(model).named_parameters())
        self.averages = {name: parameter.detach().clone() for name, parameter in self._parameters.items()}
        """The averages, by parameter name."""
        self.updates = 0
        """Number of steps that the averages include."""

    @torch.no_grad()
    def on_step(self, run: Run) -> None:
        """Add the weights to the averages."""
        averages = list(self.averages.values())
        weights = [parameter.detach() for parameter in self._parameters.values()]
        if self.updates == 0:
            copy_each(averages, weights)
        else:
            mix_each(averages, weights, 1 - self.decay)
        self.updates += 1

    @contextmanager
    def evaluating(self, run: Run) -> Iterator[None]:
        """Use the averages in the model, and restore the weights afterwards."""
        if self.updates == 0:  # the averages are still the weights from before this run
            yield
            return
        weights = {name: parameter.data for name, parameter in self._parameters.items()}
        self._point_to(self.averages)
        try:
            yield
        finally:
            self._point_to(weights)

    @torch.no_grad()
    def on_end(self, run: Run) -> None:
        """Copy the averages into the model."""
        if self.updates:
            copy_each(list(self._parameters.values()), list(self.averages.values()))

    def state_dict(self) -> dict[str, Any]:
        """Return the averages."""
        return {"updates": self.updates, "averages": dict(self.averages)}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Load averages of the same parameters."""
        with torch.no_grad():
            for name, average in self.averages.items():
                average.copy_(saved["averages"][name])
        self.updates = int(saved["updates"])

    def _point_to(self, tensors: Mapping[str, torch.Tensor]) -> None:
        # A copy would cost time and memory, and would look as if the parameters had changed since the last step.
        for name, parameter in self._parameters.items():
            parameter.data = tensors[name]
