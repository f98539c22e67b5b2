"""What a user may choose of how gradients are averaged."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from paceline.buckets import CAPACITY, FIRST_CAPACITY
from paceline.ddp.by_algorithm import Algorithm
from paceline.ddp.unused import UnusedParameters


@dataclass(frozen=True)
class Options:
    """The reducer's choices, checked by the wrapper."""

    capacities: tuple[int, ...] = (FIRST_CAPACITY, CAPACITY)
    """Bytes of the first, second, … bucket."""
    check_finite: bool = False
    """Whether gradients are checked for NaN and Inf."""
    reduce_dtype: torch.dtype | None = None
    """In which gradients are summed, if not in their own."""
    unused: UnusedParameters = "allow"
    """What happens where a parameter has no gradient on some rank."""
    algorithm: Algorithm | None = None
    """What sums the buckets, if not the backend's own all-reduce."""
