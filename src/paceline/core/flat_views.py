"""Gradients as pieces of a flat tensor, in the shapes and strides of their parameters."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


def views_of(flat: Tensor, parameters: Sequence[Tensor]) -> list[Tensor]:
    """Return views of `flat` as gradients of `parameters`, one after the other, without gaps."""
    views, offset = [], 0
    for parameter in parameters:
        piece = flat[offset : offset + parameter.numel()]
        views.append(shaped_like(parameter, piece))
        offset += parameter.numel()
    return views


def shaped_like(parameter: Tensor, piece: Tensor) -> Tensor:
    """Return the flat `piece` in the parameter's shape, with its strides (channels-last, say) if they leave no gaps."""
    expected = 1
    for stride, extent in sorted(zip(parameter.stride(), parameter.shape, strict=True)):
        if extent != 1 and stride != expected:
            return piece.view(parameter.shape)
        expected *= extent
    return piece.as_strided(parameter.shape, parameter.stride(), piece.storage_offset())


def flattened(tensor: Tensor) -> Tensor:
    """Return a one-dimensional view of the elements of a dense `tensor`, in memory order."""
    if tensor.is_contiguous():
        return tensor.view(-1)
    return tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())
