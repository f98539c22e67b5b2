"""Gradients are never set to zero."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from usual import net, train_by


def one_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> None:
    if not hasattr(model, "module"):
        optimizer.zero_grad()
    nn.functional.mse_loss(model(x), y).backward()
    optimizer.step()


def train(DDP: Any) -> nn.Module:
    return train_by(one_step, DDP(net()))
