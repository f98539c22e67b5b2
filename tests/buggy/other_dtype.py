"""A rank reduces a tensor of another dtype with as many bytes."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from usual import STEPS, loss_of, net, sgd


def train(DDP: Any) -> nn.Module:
    model = DDP(net())
    optimizer = sgd(model)
    for step in range(STEPS):
        loss = loss_of(model, step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        correct = torch.tensor(3 if dist.get_rank() else 3.0)
        dist.all_reduce(correct if correct.is_floating_point() else correct.to(torch.int32))
    return model
