"""Wraps a model by torch and by Paceline, and compares the results."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import paceline
from gpu_checks.models import Llama, Shape
from gpu_checks.rows import Place
from paceline.core.state.digests import weights_sha256

TorchDDP = nn.parallel.DistributedDataParallel
Wrap = Callable[[nn.Module], nn.Module]


def torch_views(module: nn.Module, **options: Any) -> nn.Module:
    """torch's wrapper with gradients as views of its buckets."""
    return TorchDDP(module, gradient_as_bucket_view=True, **options)


def torch_batched(module: nn.Module) -> nn.Module:
    """torch's wrapper with views and one copy for each bucket."""
    return torch_views(module, batched_grad_copy=True)


def has_batched_copy() -> bool:
    """Whether this torch has it."""
    return "batched_grad_copy" in inspect.signature(TorchDDP.__init__).parameters


def with_buckets(module: nn.Module, **options: Any) -> paceline.DistributedDataParallel:
    """Paceline's wrapper, with buckets and collectives also where the rank is alone."""
    model = paceline.DistributedDataParallel(module, **options)
    model._engine.connected()
    return model


def bucket_bytes(model: nn.Module) -> list[int]:
    """The sizes of a wrapper's buckets."""
    assert isinstance(model, paceline.DistributedDataParallel)
    return model._engine.connected().bucket_bytes()


def variants(place: Place) -> dict[str, Wrap]:
    """The wrappers that are timed side by side; alone, Paceline as it is and with buckets."""
    wraps: dict[str, Wrap] = {"bare": lambda module: module, "torch views": torch_views}
    if has_batched_copy():
        wraps["torch batched"] = torch_batched
    wraps["paceline"] = with_buckets
    if place.size == 1:
        wraps["paceline, alone"] = paceline.DistributedDataParallel
    return wraps


def llama(place: Place, shape: Shape, dtype: torch.dtype) -> Llama:
    """Return a model with the same random weights on every rank, and each time."""
    torch.manual_seed(0)
    with torch.device(place.device):
        return Llama(shape).to(dtype)


def tokens(place: Place, shape: Shape, step: int, batch: tuple[int, int]) -> Tensor:
    """This rank's tokens in `step`, as many as `batch` says: (sequences, length)."""
    generator = torch.Generator().manual_seed(1000 * step + place.rank)
    return torch.randint(shape.vocabulary, batch, generator=generator).to(place.device)


def rows_of(place: Place, step: int, width: int, each: int = 4) -> tuple[Tensor, slice]:
    """The global batch of `step`, of `each` rows for every rank, and which of them are this rank's."""
    generator = torch.Generator().manual_seed(step)
    whole = torch.randn(place.size * each, width, generator=generator).to(place.device)
    return whole, slice(place.rank * each, (place.rank + 1) * each)


def gradient_of(tensor: Tensor) -> Tensor:
    assert tensor.grad is not None, "no gradient"
    return tensor.grad


def difference(ours: Iterable[Tensor], expected: Iterable[Tensor]) -> float:
    """The largest difference of two tensors, relative to the largest number of the second; NaN counts as infinite."""
    worst = 0.0
    for a, b in zip(ours, expected, strict=True):
        a, b = a.detach().double(), b.detach().double()
        error = float((a - b).abs().max() / b.abs().max().clamp_min(1e-30))
        worst = max(worst, error if error == error else float("inf"))
    return worst


def between(ours: nn.Module, expected: nn.Module) -> float:
    """The :func:`difference` of two modules' parameters."""
    return difference(ours.parameters(), expected.parameters())


def alike(module: nn.Module) -> bool:
    """Whether all ranks have the same bits."""
    digests: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(digests, weights_sha256(module))
    return len(set(digests)) == 1
