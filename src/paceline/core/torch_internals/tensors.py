"""Questions about a tensor's memory, and operations on lists of tensors, that torch has no public names for."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import TypeAlias

import torch
from torch import Tensor
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

Tensors: TypeAlias = list[Tensor] | tuple[Tensor, ...]
LARGE = 2**20
"""Elements from which on a single operation costs a GPU less than another pass over the tensor."""


def count_uses(storage: torch.UntypedStorage) -> int:
    """Return how many tensors and storages refer to the memory of `storage`, itself included."""
    return int(torch._C._storage_Use_Count(storage._cdata))


def has_overlap(tensor: Tensor) -> bool:
    """Return whether several elements of `tensor` surely share memory, such as in an expanded one."""
    return torch._debug_has_internal_overlap(tensor) == 1


def keep_versions(tensors: Iterable[Tensor]) -> AbstractContextManager[object]:
    """Surround writes into `tensors` that autograd's version counters do not count."""
    return _unsafe_preserve_version_counter(tuple(tensors))


def copy_each(targets: Tensors, sources: Tensors) -> None:
    """Copy each of `sources` into the target in the same place."""
    torch._foreach_copy_(targets, sources)


def copy_scaled(targets: Tensors, sources: Tensors, factor: float) -> None:
    """Copy each of `sources` times `factor` into the target in the same place."""
    if factor == 1.0:
        copy_each(targets, sources)
        return
    small: tuple[list[Tensor], list[Tensor]] = [], []
    for target, source in zip(targets, sources, strict=True):
        if source.numel() >= LARGE and source.dtype is target.dtype:
            torch.mul(source, factor, out=target)
        else:
            small[0].append(target)
            small[1].append(source)
    if small[0]:
        copy_each(*small)
        multiply_each(small[0], factor)


def norm_each(tensors: Tensors) -> Tensors:
    """Return the largest magnitude in each of `tensors`, which are not empty; NaN where there is one."""
    return torch._foreach_norm(tensors, math.inf)


def multiply_each(tensors: Tensors, factor: float) -> None:
    """Multiply each of `tensors` by `factor`, in place."""
    torch._foreach_mul_(tensors, factor)


def zero_each(tensors: Tensors) -> None:
    """Fill each of `tensors` with zeros."""
    torch._foreach_zero_(tensors)


def content_of(tensors: Sequence[Tensor]) -> int:
    """Return a number that is another when ``torch.utils.swap_tensors`` has given the first tensor another's content.

    Hooks and autograd nodes go with the content. Modules that swap their parameters swap all of them.
    """
    return tensors[0]._cdata if tensors else 0
