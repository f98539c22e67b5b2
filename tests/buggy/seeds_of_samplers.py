"""The samplers have other seeds on other ranks, so that their parts overlap."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from usual import net, samples, train_on


def data(epoch: int) -> Any:
    sampler = torch.utils.data.DistributedSampler(samples(), seed=dist.get_rank())
    sampler.set_epoch(epoch)
    return torch.utils.data.DataLoader(samples(), 8, sampler=sampler)


def train(DDP: Any) -> nn.Module:
    return train_on(data, DDP(net()))
