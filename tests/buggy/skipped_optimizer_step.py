"""A rank does not take an optimizer step, because its loss looks wrong."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import nn
from usual import STEPS, loss_of, net, sgd


def train(DDP: Any) -> nn.Module:
    model = DDP(net())
    optimizer = sgd(model)
    for step in range(STEPS):
        loss_of(model, step).backward()
        if not (dist.get_rank() == 1 and step == 2):
            optimizer.step()
        optimizer.zero_grad()
    return model
