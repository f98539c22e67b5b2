"""The losses of micro-batches are added up, and not divided by their number."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from usual import net, train_by


def one_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> None:
    micros = 2 if dist.is_initialized() and hasattr(model, "module") else 1
    optimizer.zero_grad()
    for xs, ys in zip(x.chunk(micros), y.chunk(micros), strict=True):
        nn.functional.mse_loss(model(xs), ys).backward()
    optimizer.step()


def train(DDP: Any) -> nn.Module:
    return train_by(one_step, DDP(net()))
