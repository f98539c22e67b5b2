"""Virtual ranks, which give bit-identical results on any number of ranks."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gpu_checks.models import SMALL, TINY, Llama
from gpu_checks.rows import Place, Row, holds, measured
from paceline.core.digests import weights_sha256
from sliced import SAMPLES, Steps

Make = Callable[[Place], tuple[nn.Module, Tensor]]
"""Makes a model and its data."""


def mlp(place: Place) -> tuple[nn.Module, Tensor]:
    width = 512 if place.on_gpu else 32
    layers = [nn.Linear(64, width), nn.ReLU(), nn.Dropout(0.1), nn.Linear(width, width), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(width, 8)), torch.randn(SAMPLES, 64)


def cnn(place: Place) -> tuple[nn.Module, Tensor]:
    width, side = (64, 32) if place.on_gpu else (6, 8)
    layers = [nn.Conv2d(3, width, 3), nn.BatchNorm2d(width), nn.ReLU()]
    layers += [nn.Conv2d(width, width, 3), nn.BatchNorm2d(width), nn.ReLU(), nn.Dropout(0.2)]
    head = nn.Linear(width * (side - 4) ** 2, 4)
    return nn.Sequential(*layers, nn.Flatten(), head), torch.randn(SAMPLES, 3, side, side)


def llama(place: Place) -> tuple[nn.Module, Tensor]:
    shape, length = (SMALL, 256) if place.on_gpu else (TINY, 8)
    return Llama(shape), torch.randint(shape.vocabulary, (SAMPLES, length))


MODELS: dict[str, Make] = {"MLP": mlp, "CNN": cnn, "Llama": llama}
CASES: dict[str, tuple[Make, dict[str, Any]]] = {
    "MLP with dropout, fp32": (mlp, {}),
    "MLP with dropout, bf16": (mlp, {"dtype": torch.bfloat16}),
    "MLP with dropout, fp16 and GradScaler": (mlp, {"dtype": torch.float16}),
    "MLP with dropout, ShardedOptimizer": (mlp, {"sharded": True}),
    "CNN with BatchNorm, fp32": (cnn, {}),
    "CNN with BatchNorm, bf16": (cnn, {"dtype": torch.bfloat16}),
    "Llama, fp32": (llama, {}),
    "Llama, bf16": (llama, {"dtype": torch.bfloat16}),
}
"""Models, with options of the test suite's training."""


def steps(place: Place, make: Make, **options: Any) -> Any:
    """Return a training over slices. With a `group` of one rank, it trains as if the job had one rank."""
    torch.manual_seed(3)
    module, data = make(place)
    return Steps((module.to(place.device), data), options)


def trained(place: Place, make: Make, **options: Any) -> str:
    """Train for an epoch and a step, and return the SHA-256 of weights and buffers."""
    training = steps(place, make, **options)
    training.run(5)
    return weights_sha256(training.module)


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
    for name, (make, options) in CASES.items():
        with deterministic():
            one, several = trained(place, make, group=group, **options), trained(place, make, **options)
        yield holds(f"{name}: SHA-256 as of one rank", compared(several, one), several == one)
    for name, (make, options) in CASES.items():
        one, several = trained(place, make, group=group, **options), trained(place, make, **options)
        yield measured(f"{name}: the same with torch's default kernels", compared(several, one))


def compared(bits: str, expected: str) -> str:
    return bits[:16] if bits == expected else f"{bits[:16]}, not {expected[:16]}"
