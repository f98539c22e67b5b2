"""The last of the micro-batches is inside of no_sync, too."""

from __future__ import annotations

from typing import Any

from torch import nn
from usual import STEPS, batch, net, sgd


def train(DDP: Any) -> nn.Module:
    model = DDP(net())
    optimizer = sgd(model)
    for step in range(STEPS):
        with model.no_sync():
            for x, y in zip(*(tensor.chunk(2) for tensor in batch(step)), strict=True):
                nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model
