"""What c10d hands to a process group, in the forms that collectives take."""

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
        """Write what is in :attr:`flat` to the tensor."""
        if self._is_copy:
            self._tensor.copy_(self.flat.view(self._tensor.shape))

    def __enter__(self) -> Tensor:
        return self.flat

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if kind is None:
            self.write_back()


def options_of(kind: Any, given: Any, *, reduce: bool = False) -> Any:
    """c10d's options object; callers in C++ and Python give it, an operation, or nothing."""
    if isinstance(given, kind):
        return given
    options = kind()
    if reduce and given is not None:
        options.reduceOp = given
    options.asyncOp = True
    return options


def reduction_of(op: Any) -> ReduceOp.RedOpType | None:
    """The plain reduction in c10d's object; None for one with a factor."""
    for kind in (ReduceOp.SUM, ReduceOp.AVG, ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.MAX):
        if op == kind:
            return kind
    for kind in (ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR):
        if op == kind:
            return kind
    return None
