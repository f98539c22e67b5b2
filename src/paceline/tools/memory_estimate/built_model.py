"""A model that was built without memory, with the facts about its inputs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True)
class BuiltModel:
    """A module on the meta device, or on the device of a module that the user has built already."""

    module: nn.Module
    dtype: torch.dtype | None = None
    """Dtype of the training, unless the user chooses another; None for the dtypes that the module has."""
    input_name: str | None = None
    """Name of the input of a model of transformers; None for a model whose first argument it is."""
    has_labels: bool = False
    """Whether it takes the tokens as labels, too, and computes a loss."""
    positions: int | None = None
    """Largest number of tokens that it takes, if that is known."""

    @property
    def is_of_transformers(self) -> bool:
        """Whether a library has built it, not the user's code."""
        return self.input_name is not None
