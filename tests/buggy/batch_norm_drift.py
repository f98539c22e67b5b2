"""Ranks have running statistics of their own, which a checkpoint of rank 0 has alone."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from usual import STEPS, loss_of, sgd


def train(DDP: Any) -> nn.Module:
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(4, 2), nn.BatchNorm1d(2)))
    optimizer = sgd(model)
    for step in range(STEPS):
        loss_of(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model
