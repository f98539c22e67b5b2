"""Switches optimizers that keep two views of the weights, such as schedule-free ones.

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
    """Shows the weights of an optimizer's ``train()`` to steps, and those of its ``eval()`` to everything else.

    Switching there and back rounds the weights. So those of the training are kept meanwhile, also in checkpoints, and
    a run has the same bits however often it is evaluated, saved and resumed.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer: Any = optimizer
        self.are_two = all(callable(getattr(optimizer, view, None)) for view in ("train", "eval"))
        """Whether the optimizer has two views; nothing happens here if not."""
        self._is_training = False
        self._kept: list[Tensor] = []
        """The weights of the training while ``eval()`` is in effect."""

    def train(self) -> None:
        """Show the weights to train."""
        if self.are_two:
            self._optimizer.train()
            if self._kept:
                copy_each(self._parameters(), self._kept)
            self._kept, self._is_training = [], True

    def eval(self) -> None:
        """Show the weights to use."""
        if self.are_two:
            self._optimizer.eval()
            self._is_training = False

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Show the weights to use, for an evaluation, a prediction or a save."""
        if not self._is_training:
            self.eval()
            yield
            return
        parameters = self._parameters()
        self._kept = [each.clone() for each in parameters]
        # The weights come back as they were, so a failure in the next step can still save this one.
        with keep_versions(parameters):
            self.eval()
            try:
                yield
            finally:
                self.train()

    def state_dict(self) -> dict[str, Any]:
        """Return the weights of the training if they are not those of the model."""
        return {"weights": list(self._kept)}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Load weights for the next :meth:`train`."""
        self._kept, self._is_training = [each.clone() for each in saved["weights"]], False

    def _parameters(self) -> list[Tensor]:
        return [each.detach() for group in self._optimizer.param_groups for each in group["params"]]
