"""A model that was built without memory, and what is known of its inputs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True)
class BuiltModel:
    """A module on the meta device, or wherever the user has it."""

    module: nn.Module
    dtype: torch.dtype | None = None
    """In which it is trained unless the user chooses another; None for the dtypes that it has."""
    input_name: str | None = None
    """Argument for the input of a model of transformers; None if that is the first one."""
    has_labels: bool = False
    """Whether it takes the tokens as labels, too, and computes a loss."""
    positions: int | None = None
    """How many tokens it can see, if that is known."""

    @property
    def is_of_transformers(self) -> bool:
        """Whether a library has built it, not the user's code."""
        return self.input_name is not None
