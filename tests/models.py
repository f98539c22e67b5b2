"""Small models and layers shared by several test files."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn


def chain(*widths: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> nn.Sequential:
    """Return an MLP with layers of the given `widths` and Tanh between them, initialized from `seed`."""
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    for width, following in pairwise(widths):
        layers += [nn.Linear(width, following), nn.Tanh()]
    return nn.Sequential(*layers[:-1]).to(dtype)


class Trip(torch.autograd.Function):
    """Identity whose backward raises."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise ArithmeticError("tripped")


class Average(nn.Module):
    """Subtracts a moving average of its inputs, which it updates through ``.data``, and counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("calls", torch.tensor(0))
        self.mean: Tensor
        self.calls: Tensor | None

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean.data.mul_(0.9).add_(0.1 * x.detach().mean(0))
            self.calls = None if self.calls is None else self.calls + 1
        return x - self.mean
