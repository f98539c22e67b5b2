"""The bucket: a flat tensor that holds the gradients of neighboring parameters, which are reduced together.

Parameters are assigned to buckets based on plain values only, so every rank computes the same assignment. Bucketing and
its overlap with backward follow Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training",
VLDB 2020.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import torch
from torch import Tensor

from paceline.core.state.flat_views import views_of

MIB = 2**20
FIRST_CAPACITY = MIB
"""Bytes of the first bucket to launch: small, so that communication starts early in backward."""
CAPACITY = 25 * MIB
"""Bytes of every other bucket. Measured through shared memory on two cores, with models of 3 to 17 million parameters:
the differences between 1, 4, 25 and 100 MiB are below the noise (benchmarks/results, step-time-variants)."""


def assign(
    sizes: Sequence[int], kinds: Sequence[Hashable], order: Sequence[int], capacities: Sequence[int]
) -> list[list[int]]:
    """Split the parameters in `order` into buckets, each with one dtype on one device.

    Args:
        sizes: bytes of each parameter's gradient.
        kinds: (dtype, device) of each parameter; a bucket cannot mix them.
        order: indices of all parameters in the expected order of arrival during backward.
        capacities: bytes of the first, second, … bucket; the last value applies to all further buckets. A bucket is
            closed by the parameter that fills it, so it may exceed its capacity by one parameter.

    Returns:
        The parameter indices of each bucket. Buckets are in the order that they fill up and are launched.
    """
    buckets: list[list[int]] = []
    open_buckets: dict[Hashable, list[int]] = {}
    filled: dict[Hashable, int] = {}
    for index in order:
        # A bucket is one flat tensor, so it has one dtype and one device.
        kind = kinds[index]
        bucket = open_buckets.setdefault(kind, [])
        bucket.append(index)
        filled[kind] = filled.get(kind, 0) + sizes[index]
        # The number of closed buckets is this bucket's position in the launch order, because closed buckets launch
        # first.
        if filled[kind] >= capacities[min(len(buckets), len(capacities) - 1)]:
            buckets.append(open_buckets.pop(kind))
            del filled[kind]
    position = {index: place for place, index in enumerate(order)}
    return buckets + sorted(open_buckets.values(), key=lambda bucket: position[bucket[-1]])


def arrival_order(observed: Sequence[int], count: int) -> list[int]:
    """Return all `count` parameters in `observed` order of arrival; unobserved ones come last, in reverse order.

    If a parameter arrived several times (reentrant checkpointing), its last arrival counts.
    """
    last = {index: place for place, index in enumerate(observed)}
    arrived = sorted(last, key=last.__getitem__)
    return arrived + [index for index in reversed(range(count)) if index not in last]


@dataclass(frozen=True)
class Overlap:
    """Timeline of one backward pass: seconds from its start, with one entry per bucket in launch order."""

    full: tuple[float, ...]
    """Arrival time of the bucket's last gradient."""
    begin: tuple[float, ...]
    """Start of its all-reduce."""
    end: tuple[float, ...]
    """End of its all-reduce."""

    @property
    def exposed(self) -> float:
        """Seconds that the backward pass waits for communication at its end."""
        return max(0.0, self.end[-1] - self.full[-1])


def overlap(backward: Sequence[float], reduce: Sequence[float], launch_when_full: bool = True) -> Overlap:
    """Return the timeline of a backward pass whose buckets are reduced one after another.

    Args:
        backward: seconds that backward takes to fill each bucket, in launch order; must not be empty.
        reduce: seconds of each bucket's all-reduce, assumed not to slow down backward (as with a network card).
        launch_when_full: whether each bucket is launched as soon as it is full, rather than all after backward.
    """
    full = tuple(accumulate(backward))
    begin: list[float] = []
    end: list[float] = []
    for filled, seconds in zip(full, reduce, strict=True):
        begin.append(max(filled if launch_when_full else full[-1], end[-1] if end else 0.0))
        end.append(begin[-1] + seconds)
    return Overlap(full, tuple(begin), tuple(end))


NOTHING = torch.empty(0, dtype=torch.float32, device="cpu")


@dataclass
class Bucket:
    """A flat gradient buffer with a view for each parameter's gradient."""

    indices: list[int]
    """The parameters, by index in the reducer."""
    flat: Tensor
    """All gradients, one after another, without gaps."""
    views: list[Tensor] = field(default_factory=list)
    """Views of ``flat`` for each parameter's gradient: same shape, and same strides if those are dense."""
    largest: int = 0
    """Number of elements in the largest gradient."""
    is_last: bool = False
    """Whether this bucket is launched last."""
    prescale: float = 1.0
    """Factor applied to gradients when they are copied in; unless it is 1, the bucket holds means instead of sums."""
    memory: Tensor = field(default=NOTHING)
    """The whole allocation: ``flat`` followed by the tail."""
    tail: Tensor = field(default=NOTHING)
    """Additional elements after the gradients that are reduced along with them."""

    @classmethod
    def allocate(
        cls,
        indices: list[int],
        parameters: Sequence[Tensor],
        allocate: Callable[..., Tensor] = torch.zeros,
        dtype: torch.dtype | None = None,
        tail: int = 0,
    ) -> Bucket:
        """Return a zeroed bucket for `parameters` at `indices`, which share a device; `dtype` defaults to theirs.

        ``allocate(numel, dtype=…, device=…)`` provides the memory, including room for `tail` additional elements.
        """
        members = [parameters[index] for index in indices]
        total = sum(parameter.numel() for parameter in members)
        memory = allocate(total + tail, dtype=dtype or members[0].dtype, device=members[0].device)
        flat = memory[:total]
        largest = max((parameter.numel() for parameter in members), default=0)
        return cls(indices, flat, views_of(flat, members), largest, memory=memory, tail=memory[total:])
