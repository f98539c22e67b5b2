"""Helpers of the checks: wrappers of torch and Paceline, compressors, and comparisons of results."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import paceline
from gpu_checks.models import Llama, Shape
from gpu_checks.rows import Place
from paceline import compression
from paceline.core.digests import weights_sha256
from paceline.testing.assertions import gather

TorchDDP = nn.parallel.DistributedDataParallel
Wrap = Callable[[nn.Module], nn.Module]
COMPRESSORS: dict[str, Callable[[Any], compression.Compressor]] = {
    "Cast": partial(compression.Cast, dtype=torch.bfloat16),
    "Int8": compression.Int8,
    "PowerSGD": partial(compression.PowerSGD, rank=2),
    "TopK": partial(compression.TopK, fraction=0.1),
}


def torch_views(module: nn.Module, **options: Any) -> nn.Module:
    """Wrap with torch DDP, with gradients as views of buckets."""
    return TorchDDP(module, gradient_as_bucket_view=True, **options)


def with_buckets(module: nn.Module, **options: Any) -> paceline.DistributedDataParallel:
    """Wrap with Paceline's wrapper, using buckets and collectives even on a single rank."""
    model = paceline.DistributedDataParallel(module, **options)
    model._engine.connected()
    return model


def compress(model: Any, kind: str) -> compression.Compressor:
    """Register the compressor named `kind`."""
    state = COMPRESSORS[kind](model)
    model.register_comm_hook(state, compression.hook)
    return state


def bucket_bytes(model: nn.Module) -> list[int]:
    """Return the sizes of a wrapper's buckets."""
    assert isinstance(model, paceline.DistributedDataParallel)
    return model._engine.connected().bucket_bytes()


def variants(place: Place) -> dict[str, Wrap]:
    """Return the wrappers to compare, by name."""
    wraps: dict[str, Wrap] = {"bare": lambda module: module, "torch views": torch_views}
    if "batched_grad_copy" in inspect.signature(TorchDDP.__init__).parameters:
        wraps["torch batched"] = partial(torch_views, batched_grad_copy=True)
    wraps["paceline"] = with_buckets
    if place.size == 1:
        wraps["paceline, alone"] = paceline.DistributedDataParallel
    return wraps


def llama(place: Place, shape: Shape, dtype: torch.dtype) -> Llama:
    """Return a model with random weights, which are the same on every rank and in every call."""
    torch.manual_seed(0)
    with torch.device(place.device):
        return Llama(shape).to(dtype)


def tokens(place: Place, shape: Shape, step: int, batch: tuple[int, int]) -> Tensor:
    """Return this rank's tokens in `step`, of shape `batch`: (sequences, length)."""
    generator = torch.Generator().manual_seed(1000 * step + place.rank)
    return torch.randint(shape.vocabulary, batch, generator=generator).to(place.device)


def rows_of(place: Place, step: int, width: int) -> tuple[Tensor, Tensor]:
    """Return the global batch of `step`, with four rows per rank, and this rank's rows."""
    generator = torch.Generator().manual_seed(step)
    whole = torch.randn(place.size * 4, width, generator=generator).to(place.device)
    return whole, whole[place.rank * 4 : (place.rank + 1) * 4]


def gradient_of(tensor: Tensor) -> Tensor:
    assert tensor.grad is not None, "no gradient"
    return tensor.grad


def difference(ours: Iterable[Tensor], expected: Iterable[Tensor]) -> float:
    """Return the largest difference relative to the largest expected element of the same tensor; infinite for NaN."""
    worst = 0.0
    for a, b in zip(ours, expected, strict=True):
        a, b = a.detach().double(), b.detach().double()
        error = float((a - b).abs().max() / b.abs().max().clamp_min(1e-30))
        worst = max(worst, error if error == error else float("inf"))
    return worst


def between(ours: nn.Module, expected: nn.Module) -> float:
    """Return the :func:`difference` of two modules' parameters."""
    return difference(ours.parameters(), expected.parameters())


def gradients_differ(ours: nn.Module, expected: nn.Module) -> float:
    """Return the :func:`difference` of two modules' gradients."""
    return difference(*([gradient_of(part).to_dense() for part in each.parameters()] for each in (ours, expected)))


def alike(module: nn.Module) -> bool:
    """Return whether the module is bit-identical on all ranks."""
    return len(set(gather(weights_sha256(module)))) == 1
