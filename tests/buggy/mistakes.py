"""Trainings with exactly one mistake each; `DDP` wraps the model."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

STEPS = 4


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def global_batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(8, 4, generator=generator), torch.randn(8, 2, generator=generator)


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Return this rank's slice."""
    x, y = (tensor.tensor_split(dist.get_world_size())[dist.get_rank()] for tensor in global_batch(step))
    return x, y


def loss_of(model: nn.Module, step: int) -> Tensor:
    x, y = batch(step)
    return nn.functional.mse_loss(model(x), y)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def update(optimizer: torch.optim.Optimizer) -> None:
    optimizer.step()
    optimizer.zero_grad()


def train(model: nn.Module) -> nn.Module:
    """Train without a mistake."""
    optimizer = sgd(model)
    for step in range(STEPS):
        loss_of(model, step).backward()
        update(optimizer)
    return model


# -- ranks that behave differently -------------------------------------------------------------------------------------


def branch_by_rank(DDP: Any) -> nn.Module:
    """Ranks take different branches of the model, and rank 1 does not use all parameters."""

    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.first, self.second = nn.Linear(4, 2), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.first(x) if dist.get_rank() else self.first(x) + self.second(x)

    return train(DDP(Branches()))


def batch_norm_drift(DDP: Any) -> nn.Module:
    """BatchNorm statistics are local to each rank."""
    torch.manual_seed(0)
    return train(DDP(nn.Sequential(nn.Linear(4, 2), nn.BatchNorm1d(2))))


def learning_rate_on_rank_0(DDP: Any) -> nn.Module:
    """The learning rate changes only on rank 0."""
    model = DDP(net())
    optimizer = sgd(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    for step in range(STEPS):
        loss_of(model, step).backward()
        update(optimizer)
        if dist.get_rank() == 0:
            scheduler.step()
    return model


# -- gradients ---------------------------------------------------------------------------------------------------------


def clipped_locally(DDP: Any) -> nn.Module:
    """Each rank scales averaged gradients by its local loss."""
    model = DDP(net())
    optimizer = sgd(model)
    for step in range(STEPS):
        loss = loss_of(model, step)
        loss.backward()
        for parameter in model.parameters():
            parameter.grad.div_(max(1.0, loss.item()))
        update(optimizer)
    return model


def loss_not_divided(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> None:
    """The losses of micro-batches are not divided by their number."""
    micros = 2 if dist.is_initialized() and hasattr(model, "module") else 1
    optimizer.zero_grad()
    for xs, ys in zip(x.chunk(micros), y.chunk(micros), strict=True):
        nn.functional.mse_loss(model(xs), ys).backward()
    optimizer.step()


def stale_gradients(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> None:
    """Gradients are not zeroed."""
    if not hasattr(model, "module"):
        optimizer.zero_grad()
    nn.functional.mse_loss(model(x), y).backward()
    optimizer.step()


def summed_loss(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> None:
    """The loss is a sum over samples, but gradients are averaged over ranks."""
    optimizer.zero_grad()
    nn.functional.mse_loss(model(x), y, reduction="sum").backward()
    optimizer.step()


# -- data --------------------------------------------------------------------------------------------------------------


def samples() -> TensorDataset:
    return TensorDataset(torch.arange(32.0).view(-1, 1).repeat(1, 4), torch.zeros(32, 2))


def no_sampler(epoch: int) -> Any:
    """The loader has no distributed sampler, so all ranks train on all data."""
    return DataLoader(samples(), 8, shuffle=True)


def seeds_of_samplers(epoch: int) -> Any:
    """The samplers have a different seed on each rank, so ranks share samples."""
    sampler: DistributedSampler[Any] = DistributedSampler(samples(), seed=dist.get_rank())
    sampler.set_epoch(epoch)
    return DataLoader(samples(), 8, sampler=sampler)


def set_epoch_forgotten(epoch: int) -> Any:
    """Without set_epoch, every epoch repeats the order of the first."""
    return DataLoader(samples(), 8, sampler=DistributedSampler(samples()))


TRAININGS = [branch_by_rank, batch_norm_drift, learning_rate_on_rank_0, clipped_locally]
STEPS_ALONE = [loss_not_divided, stale_gradients, summed_loss]
"""Functions that take one step, so they can be compared with one process."""
LOADERS = [no_sampler, seeds_of_samplers, set_epoch_forgotten]
"""Functions that return the batches of an epoch."""


def train_by(one_step: Any, model: nn.Module) -> nn.Module:
    optimizer = sgd(model)
    for step in range(STEPS):
        one_step(model, optimizer, *batch(step))
    return model


def train_on(data: Any, model: nn.Module) -> nn.Module:
    optimizer = sgd(model)
    for epoch in range(2):
        for x, y in data(epoch):
            nn.functional.mse_loss(model(x), y).backward()
            update(optimizer)
    return model
