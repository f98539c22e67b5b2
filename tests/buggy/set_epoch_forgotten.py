"""The sampler is not told of the epoch, so that every epoch has the same order."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from usual import net, samples, train_on


def data(epoch: int) -> Any:
    sampler = torch.utils.data.DistributedSampler(samples())
    return torch.utils.data.DataLoader(samples(), 8, sampler=sampler)


def train(DDP: Any) -> nn.Module:
    return train_on(data, DDP(net()))
