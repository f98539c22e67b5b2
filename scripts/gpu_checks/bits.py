"""Virtual ranks, which give bit-identical results on any number of ranks, and the compute check."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.utils.data import TensorDataset

import paceline
from gpu_checks.models import SMALL, TINY, Llama
from gpu_checks.rows import Place, Row, holds, measured
from paceline.core.state.digests import weights_sha256
from paceline.data import DataLoader, GlobalBatchSampler
from paceline.errors import UsageError, WrongComputation
from paceline.optim import ShardedOptimizer

SLICES, BATCH, SAMPLES = 4, 16, 42
"""With these sizes, the last batch of an epoch has 10 samples, so its slices are uneven."""


class Net(nn.Module):
    """Layers; forward returns the mean square of their outputs."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(x).float()
        return out.square().mean()


def mlp(place: Place, dropout: float = 0.1) -> tuple[nn.Module, Tensor]:
    width = 512 if place.on_gpu else 32
    layers = [nn.Linear(64, width), nn.ReLU(), nn.Dropout(dropout), nn.Linear(width, width), nn.Tanh()]
    return Net(*layers, nn.Linear(width, 8)), torch.randn(SAMPLES, 64)


def cnn(place: Place) -> tuple[nn.Module, Tensor]:
    width, side = (64, 32) if place.on_gpu else (6, 8)
    layers = [nn.Conv2d(3, width, 3), nn.BatchNorm2d(width), nn.ReLU()]
    layers += [nn.Conv2d(width, width, 3), nn.BatchNorm2d(width), nn.ReLU(), nn.Dropout(0.2)]
    return Net(*layers, nn.Flatten(), nn.Linear(width * (side - 4) ** 2, 4)), torch.randn(SAMPLES, 3, side, side)


def llama(place: Place) -> tuple[nn.Module, Tensor]:
    shape, length = (SMALL, 256) if place.on_gpu else (TINY, 8)
    return Llama(shape), torch.randint(shape.vocabulary, (SAMPLES, length))


@dataclass(frozen=True)
class Case:
    """One training."""

    name: str
    make: Callable[[Place], tuple[nn.Module, Tensor]]
    dtype: torch.dtype | None = None
    """The dtype of autocast; with fp16, a GradScaler scales the loss."""
    sharded: bool = False
    every: int | None = None
    """Steps between compute checks; None for no check."""
    epochs: int = 2


CASES = (
    Case("MLP with dropout, fp32", mlp),
    Case("MLP with dropout, bf16", mlp, torch.bfloat16),
    Case("MLP with dropout, fp16 and GradScaler", mlp, torch.float16),
    Case("MLP with dropout, ShardedOptimizer", mlp, sharded=True),
    Case("CNN with BatchNorm, fp32", cnn),
    Case("CNN with BatchNorm, bf16", cnn, torch.bfloat16),
    Case("Llama, fp32", llama),
    Case("Llama, bf16", llama, torch.bfloat16),
)


class Training:
    """A training loop over slices. With a `group` of one rank, it trains as if the job had one rank."""

    def __init__(self, place: Place, case: Case, group: Any = None) -> None:
        torch.manual_seed(3)
        module, data = case.make(place)
        self.place, self.case, self.module = place, case, module.to(place.device)
        options = {"virtual_ranks": SLICES, "check_compute_every": case.every, "process_group": group}
        self.model = paceline.DistributedDataParallel(self.module, **options)
        self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        if case.sharded:
            self.optimizer = ShardedOptimizer(self.model, torch.optim.AdamW, lr=1e-3)
        rank, size = (place.rank, place.size) if group is None else (0, 1)
        sampler = GlobalBatchSampler(SAMPLES, BATCH, seed=5, rank=rank, world_size=size)
        self.loader = DataLoader(TensorDataset(data), batch_sampler=sampler)
        self.scaler = GradScaler(place.device.type, enabled=case.dtype is torch.float16)
        self.number, self.repeats = 1, 0
        """Current step, starting at 1, and number of slices that were computed again."""

    def run(self) -> str:
        """Train, and return the SHA-256 of weights and buffers."""
        for _ in range(self.case.epochs):
            for batch in paceline.accumulate(self.model, self.loader):
                self._slice(batch)
        return weights_sha256(self.module)

    def _slice(self, batch: Any) -> None:
        x = batch[0].to(self.place.device)
        dtype = self.case.dtype
        with nullcontext() if dtype is None else torch.autocast(self.place.device.type, dtype):
            loss = self.model(x)
        with self.model.weight(len(x)):
            self.scaler.scale(loss * len(x)).backward()
        self.repeats += self.model.is_repeat
        if self.model.do_sync:
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.optimizer.zero_grad()
            self.number += 1


@contextmanager
def deterministic() -> Iterator[None]:
    """Make torch use deterministic kernels."""
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # torch requires it
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about operators without a deterministic kernel
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(False)


@cache
def alone(place: Place) -> Any:
    """Return a process group of only this rank. Every rank takes part in creating all of these groups."""
    return [dist.new_group([rank]) for rank in range(place.size)][place.rank]


def same_bits(place: Place) -> Iterator[Row]:
    """Training on these ranks is bit-identical to training on one rank, and training on one rank is repeatable."""
    group = alone(place)
    for case in CASES:
        with deterministic():
            one, several = Training(place, case, group).run(), Training(place, case).run()
        yield holds(f"{case.name}: SHA-256 as of one rank", compared(several, one), several == one)
    for case in CASES:
        one, several = Training(place, case, group).run(), Training(place, case).run()
        yield measured(f"{case.name}: the same with torch's default kernels", compared(several, one))
    place.tidy()


def compared(bits: str, expected: str) -> str:
    return bits[:16] if bits == expected else f"{bits[:16]}, not {expected[:16]}"


def checked(place: Place) -> Iterator[Row]:
    """A compute check in every step reports a flipped bit and its rank, has no false alarms and changes no result."""
    for make, name in ((mlp, "MLP"), (cnn, "CNN"), (llama, "Llama")):
        value, right = "", False
        with deterministic():
            expected = Training(place, Case(name, make, epochs=4)).run()
            training = Training(place, Case(name, make, every=1, epochs=4))
            try:
                bits = training.run()
                value, right = f"{compared(bits, expected)}, {training.repeats} repeats", bits == expected
            except (UsageError, WrongComputation) as error:
                value = str(error)
        yield holds(f"{name}, check_compute_every=1, 12 steps: no error, the same bits", value, right)
        if place.size == 1 or right:  # otherwise, ranks may be in different steps
            yield flipped(place, make, name)
    value = "no error: they are deterministic here"
    try:
        for make in (mlp, cnn, llama):
            Training(place, Case("default kernels", make, every=1)).run()
    except (UsageError, WrongComputation) as error:
        value = str(error)
    yield measured("the three models with torch's default kernels", value)


def flipped(place: Place, make: Callable[[Place], tuple[nn.Module, Tensor]], name: str) -> Row:
    """Flip a bit in step 3 on the rank that this step checks, and return the line about the error."""
    bad, message, ranks = 2 % place.size, "no error", tuple[int, ...]()
    training = Training(place, Case(name, make, every=1))
    left = [1]

    def flip(gradient: Tensor) -> Tensor:
        if place.rank != bad or training.number != 3 or not left:
            return gradient
        left.clear()
        changed = gradient.detach().clone()
        changed.view(-1).view(torch.int32)[7] ^= 1 << 22
        return changed

    next(iter(training.module.parameters())).register_hook(flip)
    with deterministic():
        try:
            training.run()
        except (UsageError, WrongComputation) as error:
            message, ranks = str(error), getattr(error, "ranks", ())
    right = ranks == (bad,) and message.startswith("in step 3, ") and f"({place.device}, " in message
    return holds(f"{name}: a flipped bit in a gradient is named with rank and device", message, right)
