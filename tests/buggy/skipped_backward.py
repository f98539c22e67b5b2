"""A rank leaves out a step, because its loss looks wrong."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import nn
from usual import STEPS, loss_of, net, sgd


def train(DDP: Any) -> nn.Module:
    model = DDP(net())
    optimizer = sgd(model)
    for step in range(STEPS):
        loss = loss_of(model, step)
        if dist.get_rank() == 1 and step == 2:
            continue
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model
