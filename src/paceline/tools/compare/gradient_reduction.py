"""Measures what all-reducing the gradients of a step takes while nothing else runs."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

BUCKET = 25 * 2**20
"""Bytes of an all-reduce."""


class AllReduce:
    """All-reduces as many bytes as the wrappers' gradients have.

    A single bucket stands for all of a wrapper's, so that measuring takes little memory.
    """

    def __init__(self) -> None:
        self._buckets: list[Tensor] = []
        """One for each wrapper, made when that is first measured."""

    def seconds(self, wrappers: Sequence[Any]) -> float:
        """Return this rank's seconds; 0 if it is alone. All ranks call this together."""
        if dist.get_world_size() == 1:
            return 0.0
        for wrapper in wrappers[len(self._buckets) :]:
            self._buckets.append(_bucket_for(wrapper))
        return sum(_timed(wrapper, bucket) for wrapper, bucket in zip(wrappers, self._buckets, strict=True))


def _bucket_for(wrapper: Any) -> Tensor:
    """Return zeros, in the group's shared memory if it has any, as the wrapper's buckets are."""
    group, parameter = wrapper.process_group, next(wrapper.parameters())
    numel = min(int(wrapper.gradient_bytes_per_step), BUCKET) // parameter.element_size()
    if parameter.device.type == "cpu" and getattr(group, "native", False):
        shared: Tensor = group.allocate(numel, parameter.dtype)
        return shared
    return torch.zeros(numel, dtype=parameter.dtype, device=parameter.device)


def _timed(wrapper: Any, bucket: Tensor) -> float:
    group, left = wrapper.process_group, int(wrapper.gradient_bytes_per_step) // bucket.element_size()
    dist.barrier(group=group)
    start = time.perf_counter()
    while left:
        part = bucket[: min(left, len(bucket))]
        dist.all_reduce(part, group=group)
        left -= len(part)
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter() - start
