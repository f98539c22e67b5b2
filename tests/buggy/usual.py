"""What the buggy trainings have in common: a model, batches, an optimizer; nothing of it is wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

STEPS = 4


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def global_batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(8, 4, generator=generator), torch.randn(8, 2, generator=generator)


def batch(step: int) -> tuple[Tensor, Tensor]:
    """This rank's slice."""
    x, y = (tensor.tensor_split(dist.get_world_size())[dist.get_rank()] for tensor in global_batch(step))
    return x, y


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def loss_of(model: nn.Module, step: int) -> Tensor:
    x, y = batch(step)
    return nn.functional.mse_loss(model(x), y)


def samples() -> Any:
    return torch.utils.data.TensorDataset(torch.arange(32.0).view(-1, 1).repeat(1, 4), torch.zeros(32, 2))


def train_on(data: Callable[[int], Any], model: nn.Module) -> nn.Module:
    """Train two epochs on what `data` gives for each."""
    optimizer = sgd(model)
    for epoch in range(2):
        for x, y in data(epoch):
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    return model


def train_by(one_step: Callable[..., object], model: nn.Module) -> nn.Module:
    """Train with a function that takes a step."""
    optimizer = sgd(model)
    for step in range(STEPS):
        one_step(model, optimizer, *batch(step))
    return model
