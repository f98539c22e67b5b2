"""Small models, and parts of models, that several test files train."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn


def chain(*widths: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> nn.Sequential:
    """Linear layers from each of `widths` to the next with Tanh between them; the same values for the same `seed`."""
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    for width, following in pairwise(widths):
        layers += [nn.Linear(width, following), nn.Tanh()]
    return nn.Sequential(*layers[:-1]).to(dtype)


class Trip(torch.autograd.Function):
    """Passes its input on; its backward raises."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise ArithmeticError("tripped")
