"""Questions about a tensor's memory, and operations on lists of tensors, that torch has no public names for."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils._pytree import tree_map as tree_map

Tensors: TypeAlias = list[Tensor] | tuple[Tensor, ...]
copy_each: Callable[[Tensors, Tensors], None] = torch._foreach_copy_
"""Copies each of the second tensors to the first one at the same index. These names are torch's functions without a
Python call around them, because each bucket uses them in each step."""
multiply_each: Callable[[Tensors, float], object] = torch._foreach_mul_
"""Multiplies each of the tensors by a number, in place."""
add_each: Callable[[Tensors, Tensors], object] = torch._foreach_add_
"""Adds each of the second tensors to the first one in the same place."""
mix_each: Callable[[Tensors, Tensors, float], object] = torch._foreach_lerp_
"""Moves each of the first tensors towards the second one in the same place, by a share of their difference."""
zero_each: Callable[[Tensors], object] = torch._foreach_zero_
"""Fills each of the tensors with zeros."""
count_each: Callable[[int], int] = torch._C._storage_Use_Count
"""Counts the tensors and storages that refer to the memory of a storage, given by its :func:`address_of`."""
LARGE = 2**20
"""Elements above which, on a GPU, a separate operation is cheaper than another pass over the tensor."""


def address_of(storage: torch.UntypedStorage) -> int:
    """Return torch's own address of `storage`, which stays as long as it does."""
    return int(storage._cdata)


def count_uses(storage: torch.UntypedStorage) -> int:
    """Return how many tensors and storages refer to the memory of `storage`, itself included."""
    return count_each(storage._cdata)


def has_overlap(tensor: Tensor) -> bool:
    """Return whether several elements of `tensor` surely share memory, such as in an expanded one."""
    return torch._debug_has_internal_overlap(tensor) == 1


def is_plain(tensor: Tensor) -> bool:
    """Return whether a tensor is no more than elements in memory, one after the other by strides."""
    if type(tensor) not in (Tensor, nn.Parameter) or tensor.layout is not torch.strided or tensor.is_quantized:
        return False
    return tensor.device.type != "meta" and not tensor.is_conj() and not tensor.is_neg()


def keep_versions(tensors: Iterable[Tensor]) -> AbstractContextManager[object]:
    """Surround writes into `tensors` that autograd's version counters do not count."""
    return _unsafe_preserve_version_counter(tuple(tensors))


def copy_scaled(targets: Tensors, sources: Tensors, factor: float) -> None:
    """Copy each of `sources` times `factor` into the target in the same place."""
    if factor == 1.0:
        copy_each(targets, sources)
        return
    small: tuple[list[Tensor], list[Tensor]] = [], []
    for target, source in zip(targets, sources, strict=True):
        if source.numel() >= LARGE and source.dtype is target.dtype and source.shape == target.shape:
            torch.mul(source, factor, out=target)
        else:
            small[0].append(target)
            small[1].append(source)
    if small[0]:
        copy_each(*small)
        multiply_each(small[0], factor)


def norm_each(tensors: Tensors) -> Tensors:
    """Return the largest magnitude in each of `tensors`, which are not empty; NaN if it has one."""
    return torch._foreach_norm(tensors, math.inf)


def content_of(tensors: Sequence[Tensor]) -> int:
    """Return a number that is another when ``torch.utils.swap_tensors`` has given the first tensor another's content.

    Hooks and autograd nodes go with the content. Modules that swap their parameters swap all of them.
    """
    return tensors[0]._cdata if tensors else 0
