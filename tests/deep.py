"""A model of many small buckets, and data for it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

TINY = 1e-4
"""Bucket capacity in MiB that fits only one or two parameters."""


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[nn.Linear(4, 4, dtype=torch.float64) for _ in range(6)])

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def data(rank: int, step: int, count: int = 3) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(count, 4, generator=generator, dtype=torch.float64)
