"""Tensors as pieces of a flat tensor: in memory order, with the strides of parameters, or in the order of indices."""

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


def split_like(flat: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return contiguous views of `flat` in the shapes of `tensors`, which may differ in memory order between ranks."""
    pieces = flat.split([tensor.numel() for tensor in tensors])
    return [piece.view(tensor.shape) for piece, tensor in zip(pieces, tensors, strict=True)]


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
