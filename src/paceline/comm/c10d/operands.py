"""The arguments that c10d hands to a process group, in the forms that collectives take."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed import ReduceOp


class Flat:
    """A tensor as a flat contiguous one, which is written back to the tensor at the end of a ``with``."""

    flat: Tensor

    def __init__(self, tensor: Tensor, *, read: bool = True) -> None:
        self._tensor = tensor.detach()
        self._is_copy = not tensor.is_contiguous()
        whole = self._tensor
        if self._is_copy:
            whole = whole.contiguous() if read else torch.empty(whole.shape, dtype=whole.dtype, device=whole.device)
        self.flat = whole.view(-1)

    def write_back(self) -> None:
        """Copy :attr:`flat` to the tensor."""
        if self._is_copy:
            self._tensor.copy_(self.flat.view(self._tensor.shape))

    def __enter__(self) -> Tensor:
        return self.flat

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if kind is None:
            self.write_back()


def options_of(options_class: Any, argument: Any, *, reduce: bool = False) -> Any:
    """Return c10d's options object; callers in C++ and Python pass it, an operation, or nothing."""
    if isinstance(argument, options_class):
        return argument
    options = options_class()
    if reduce and argument is not None:
        options.reduceOp = argument
    options.asyncOp = True
    return options


def reduction_of(op: Any) -> ReduceOp.RedOpType | None:
    """Return the plain reduction in c10d's object; None for one with a factor."""
    for plain in (ReduceOp.SUM, ReduceOp.AVG, ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.MAX):
        if op == plain:
            return plain
    for plain in (ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR):
        if op == plain:
            return plain
    return None
