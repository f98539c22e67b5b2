"""A tensor that has a shape, a dtype and a device, but no memory."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import Tensor

disabled_torch_function: Any = torch._C._disabled_torch_function_impl
"""For subclasses that look at operations in ``__torch_dispatch__`` alone."""
Kind = TypeVar("Kind", bound=Tensor)


def made_like(kind: type[Kind], like: Tensor) -> Kind:
    """Return a tensor of the subclass `kind` that looks like `like`, and has no memory.

    ``kind.__torch_dispatch__`` decides the result of every operation on it.
    """
    make: Any = torch.Tensor._make_wrapper_subclass
    made: Kind = make(kind, like.shape, strides=like.stride(), dtype=like.dtype, device=like.device)
    return made
