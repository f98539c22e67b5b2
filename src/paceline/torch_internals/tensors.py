"""Questions about a tensor's memory, and operations on lists of tensors, that torch has no public names for."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import TypeAlias

import torch
from torch import Tensor
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

Tensors: TypeAlias = list[Tensor] | tuple[Tensor, ...]


def count_uses(storage: torch.UntypedStorage) -> int:
    """Return how many tensors and storages refer to the memory of `storage`, itself included."""
    return int(torch._C._storage_Use_Count(storage._cdata))


def has_overlap(tensor: Tensor) -> bool:
    """Return whether several elements of `tensor` surely share memory, as in an expanded one."""
    return torch._debug_has_internal_overlap(tensor) == 1


def keep_versions(tensors: Iterable[Tensor]) -> AbstractContextManager[object]:
    """Surround writes into `tensors` of which autograd's version counters learn nothing."""
    return _unsafe_preserve_version_counter(tuple(tensors))


def copy_each(targets: Tensors, sources: Tensors) -> None:
    """Copy each of `sources` into the target in the same place."""
    torch._foreach_copy_(targets, sources)


def add_each(targets: Tensors, summands: Tensors) -> None:
    """Add each of `summands` to the target in the same place, in place."""
    torch._foreach_add_(targets, summands)


def multiply_each(tensors: Tensors, factor: float) -> None:
    """Multiply each of `tensors` by `factor`, in place."""
    torch._foreach_mul_(tensors, factor)


def zero_each(tensors: Tensors) -> None:
    """Fill each of `tensors` with zeros."""
    torch._foreach_zero_(tensors)
