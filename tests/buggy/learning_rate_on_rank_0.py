"""The learning rate changes on rank 0 alone."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from usual import STEPS, loss_of, net, sgd


def train(DDP: Any) -> nn.Module:
    model = DDP(net())
    optimizer = sgd(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    for step in range(STEPS):
        loss_of(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            scheduler.step()
    return model
