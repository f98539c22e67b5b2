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


class Average(nn.Module):
    """A layer that subtracts a moving average of its inputs, which it keeps through ``.data``, and counts its calls."""

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
