"""A rank takes another branch of the model, and does not use all parameters."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from usual import STEPS, loss_of, sgd


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 2), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(x) if dist.get_rank() else self.first(x) + self.second(x)


def train(DDP: Any) -> nn.Module:
    torch.manual_seed(0)
    model = DDP(Branches())
    optimizer = sgd(model)
    for step in range(STEPS):
        loss_of(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model
