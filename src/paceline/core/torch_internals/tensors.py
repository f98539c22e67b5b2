"""Functions without a public API in torch: queries about a tensor's memory, and operations on lists of tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils._pytree import tree_map as tree_map

Tensors: TypeAlias = list[Tensor] | tuple[Tensor, ...]
copy_each: Callable[[Tensors, Tensors], None] = torch._foreach_copy_
"""Copies each tensor in the second list to the tensor at the same index in the first list. These names refer to torch's
functions directly, without a wrapper, because every bucket uses them in every step."""
multiply_each: Callable[[Tensors, float], object] = torch._foreach_mul_
"""Multiplies each tensor by a number, in place."""
add_each: Callable[[Tensors, Tensors], object] = torch._foreach_add_
"""Adds each tensor in the second list to the tensor at the same index in the first list, in place."""
mix_each: Callable[[Tensors, Tensors, float], object] = torch._foreach_lerp_
"""Moves each tensor in the first list toward the tensor at the same index in the second list (``lerp``), in place."""
zero_each: Callable[[Tensors], object] = torch._foreach_zero_
"""Fills each tensor with zeros."""
count_each: Callable[[int], int] = torch._C._storage_Use_Count
"""Counts the tensors and storages that refer to the memory of the storage with this :func:`address_of`."""
LARGE = 2**20
"""Minimum size of a tensor for which a separate operation on a GPU costs less than another pass over the tensor."""


def address_of(storage: torch.UntypedStorage) -> int:
    """Return torch's own address of `storage`, which is valid as long as the storage exists."""
    return int(storage._cdata)


def count_uses(storage: torch.UntypedStorage) -> int:
    """Return how many tensors and storages refer to the memory of `storage`, including itself."""
    return count_each(storage._cdata)


def has_overlap(tensor: Tensor) -> bool:
    """Return whether elements of `tensor` certainly share memory, for example after ``expand``."""
    return torch._debug_has_internal_overlap(tensor) == 1


def has_elements(tensor: Tensor) -> bool:
    """Return whether the elements of `tensor` can be read like those of a dense tensor; quantized weights refuse."""
    if tensor.is_quantized or tensor.is_nested or tensor.layout is not torch.strided or tensor.is_meta:
        return False
    try:  # with none of the elements of a subclass, so that nothing is copied
        read = tensor if type(tensor) in (Tensor, nn.Parameter) else torch.cat([tensor.detach().reshape(-1)[:0]])
        return type(read).__torch_dispatch__ is Tensor.__torch_dispatch__
    except Exception:
        return False


def is_plain(tensor: Tensor) -> bool:
    """Return whether a tensor is ordinary and strided: not a subclass, quantized, on ``meta``, or lazily conjugated."""
    if type(tensor) not in (Tensor, nn.Parameter) or tensor.layout is not torch.strided or tensor.is_quantized:
        return False
    return tensor.device.type != "meta" and not tensor.is_conj() and not tensor.is_neg()


def copy_scaled(targets: Tensors, sources: Tensors, factor: float) -> None:
    """Copy each of `sources`, times `factor`, to the target at the same index."""
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


def stored_elements(gradient: Tensor) -> Tensor:
    """Return the elements that a gradient stores: all of a dense one, the values of a sparse one."""
    return gradient._values() if gradient.is_sparse else gradient


def has_nonzero(gradient: Tensor) -> bool:
    """Return whether an element is nonzero; waits for the device."""
    return bool(stored_elements(gradient).any())


def norm_each(tensors: Tensors) -> Tensors:
    """Return the largest absolute value in each of the nonempty `tensors`; NaN if a tensor contains NaN."""
    reals = [torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor for tensor in tensors]
    return torch._foreach_norm(reals, math.inf)


def content_of(tensors: Sequence[Tensor]) -> int:
    """Return a number that changes when ``torch.utils.swap_tensors`` swaps the content of the first tensor.

    Hooks and autograd nodes move with the content. The first tensor is enough: modules swap all parameters or none.
    """
    return tensors[0]._cdata if tensors else 0
