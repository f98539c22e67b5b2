"""The size of a forward's input."""

from __future__ import annotations

import math
from typing import Any

import torch

from paceline.nn.data_parallel import nested_tensors


def size_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, int]:
    """Return the rows of the first input that is a tensor, and its cells: rows times columns, padding included."""
    first = args[0] if args else None  # most models' only input
    if not (isinstance(first, torch.Tensor) and first.dim()):
        first = next((tensor for tensor in nested_tensors((args, kwargs)) if tensor.dim()), None)
    return (0, 0) if first is None else (len(first), math.prod(first.shape[:2]))
