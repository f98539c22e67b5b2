"""Weights are loaded after wrapping, on rank 0 alone."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import nn
from usual import STEPS, loss_of, net, sgd


def train(DDP: Any) -> nn.Module:
    model = DDP(net())
    if dist.get_rank() == 0:
        model.module.load_state_dict({name: value + 1 for name, value in net().state_dict().items()})
    optimizer = sgd(model)
    for step in range(STEPS):
        loss_of(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model
