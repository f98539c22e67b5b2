"""Weights of optimizers that have ``train()`` and ``eval()``, such as schedule-free optimizers.

Defazio et al., "The Road Less Scheduled", 2024.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from paceline.core.torch_internals.tensors import copy_each, keep_versions


class WeightViews:
    """Switches between the training weights, which steps use, and the evaluation weights.

    Switching back and forth rounds the weights. A copy of the training weights is therefore kept during evaluations and
    in checkpoints, so that a run stays bit-identical with or without evaluating, saving and resuming.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer: Any = optimizer
        self.are_two = all(callable(getattr(optimizer, view, None)) for view in ("train", "eval"))
        """Whether the optimizer has both methods; otherwise, this class has no effect."""
        self._is_training = False
        self._kept: list[Tensor] = []
        """The training weights while the model has the evaluation weights."""

    def train(self) -> None:
        """Switch to the training weights."""
        if self.are_two:
            self._optimizer.train()
            if self._kept:
                copy_each(self._parameters(), self._kept)
            self._kept, self._is_training = [], True

    def eval(self) -> None:
        """Switch to the evaluation weights."""
        if self.are_two:
            self._optimizer.eval()
            self._is_training = False

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Use the evaluation weights in an evaluation, a prediction or a save."""
        if not self._is_training:
            self.eval()
            yield
            return
        parameters = self._parameters()
        self._kept = [weight.clone() for weight in parameters]
        # The weights are restored exactly, so a failure in the next step can still save this one.
        with keep_versions(parameters):
            self.eval()
            try:
                yield
            finally:
                self.train()

    def state_dict(self) -> dict[str, Any]:
        """Return the training weights if the model currently has the evaluation weights."""
        return {"weights": list(self._kept)}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Load training weights for the next :meth:`train`."""
        self._kept, self._is_training = [weight.clone() for weight in saved["weights"]], False

    def _parameters(self) -> list[Tensor]:
        return [weight.detach() for group in self._optimizer.param_groups for weight in group["params"]]
