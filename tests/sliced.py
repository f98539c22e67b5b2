"""Training on virtual ranks: models, data with random noise, and a loop whose steps can be aborted and resumed."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.utils.data import Dataset

from paceline.data import DataLoader, GlobalBatchSampler
from paceline.ddp import DistributedDataParallel, accumulate
from paceline.optim import ShardedOptimizer

SAMPLES, BATCH = 3 * 32 + 5, 32
"""The last batch of an epoch has 5 samples, so 3 of 8 virtual ranks have an empty slice."""


class Noisy(Dataset[Tensor]):
    """Samples augmented with random noise."""

    def __init__(self, *shape: int) -> None:
        self.samples = torch.randn(SAMPLES, *shape, generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Tensor:
        sample = self.samples[index]
        return sample + 0.1 * torch.randn(sample.shape)


class Private(nn.Module):
    """Adds noise from a private generator."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(0)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.randn(x.shape, generator=self.generator)


class Unsteady(nn.Module):
    """Nondeterministic: returns different bits in each call."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * (1 + 1e-3 * self.calls)


class Branches(nn.Module):
    """A trunk, and a branch used only by slices whose first number is positive."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.branch = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        out = self.trunk(x)
        return self.branch(out) if len(x) and x[0, 0] > 0 else out


def model_and_data(kind: str) -> tuple[nn.Module, Noisy]:
    torch.manual_seed(3)
    if kind == "cnn":
        first, second = nn.Conv2d(2, 6, 3), nn.Conv2d(6, 6, 3)
        layers = [first, nn.BatchNorm2d(6), nn.ReLU(), second, nn.BatchNorm2d(6), nn.ReLU(), nn.Dropout(0.2)]
        return nn.Sequential(*layers, nn.Flatten(), nn.Linear(6 * 16, 4)), Noisy(2, 8, 8)
    if kind == "branches":
        return Branches(), Noisy(8)
    width = 200 if kind == "mlp" else 16
    middle: nn.Module = nn.Tanh()
    if kind == "spectral":  # each forward updates buffers that the next one uses
        middle = nn.utils.parametrizations.spectral_norm(nn.Linear(16, 16))
    elif kind == "kernel":
        middle = Unsteady()
    elif kind == "private":
        middle = Private()
    # No dropout in tests that flip bits, because it may hide a flip.
    dropout = nn.Dropout(0.0 if kind == "all count" else 0.1)
    return nn.Sequential(nn.Linear(8, width), middle, dropout, nn.Linear(width, 8)), Noisy(8)


def bits(module: nn.Module) -> bytes:
    """Return all weights and buffers as bytes."""
    return b"".join(value.cpu().numpy().tobytes() for value in module.state_dict().values())


class Steps:
    """A training loop; `number` is the current step, counted from 1. An epoch has four steps."""

    def __init__(self, kind: str | tuple[nn.Module, Any], options: dict[str, Any]) -> None:
        """`kind` may also be a pair of a model and its data. With a `group` of one rank, each rank trains alone."""
        self.module, data = model_and_data(kind) if isinstance(kind, str) else kind
        self.device = next(self.module.parameters()).device
        group, self.dtype = options.get("group"), options.get("dtype")
        self.model = DistributedDataParallel(
            self.module,
            virtual_ranks=options.get("count", 4),
            unused_parameters="allow",
            process_group=group,
        )
        self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        if options.get("sharded"):
            self.optimizer = ShardedOptimizer(self.model, torch.optim.AdamW, lr=1e-2)
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        sampler = GlobalBatchSampler(data, BATCH, rank=rank, world_size=size)
        self.loader = DataLoader(data, batch_sampler=sampler, num_workers=options.get("workers", 0))
        self.scaler = GradScaler(self.device.type, enabled=self.dtype is torch.float16)
        self.weighted = options.get("weighted", True)
        self.number = 1
        self.samples = 0

    def slice(self, x: Tensor) -> None:
        with torch.autocast(self.device.type, self.dtype, enabled=self.dtype is not None):
            loss = self.model(x.to(self.device)).float().square().mean()
        if self.weighted:
            with self.model.weight(len(x)):
                self.scaler.scale(loss * len(x)).backward()
        else:
            loss.backward()
        self.samples += len(x)
        if self.model.do_sync:
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.model.parameters(), 0.05)
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.optimizer.zero_grad()
            self.number += 1

    def run(self, steps: int) -> bytes:
        """Train until `steps` steps are done; return weights and buffers."""
        while self.number <= steps:
            for x in accumulate(self.model, self.loader):
                self.slice(x)
                if self.model.do_sync and self.number > steps:
                    break
        return bits(self.module)
