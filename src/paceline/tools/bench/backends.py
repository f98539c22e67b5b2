"""The implementations to measure: Paceline's algorithms, Gloo and the shared-memory group."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.comm.algorithms import build
from paceline.comm.algorithms.execute import execute
from paceline.comm.algorithms.participants import Members
from paceline.comm.c10d.process_group import PacelineProcessGroup

OURS: dict[str, tuple[str, ...]] = {
    "all_reduce": ("ring_all_reduce", "tree_all_reduce", "halving_doubling_all_reduce"),
    "broadcast": ("linear_broadcast", "tree_broadcast", "scatter_all_gather_broadcast"),
    "reduce": ("linear_reduce", "tree_reduce"),
    "reduce_scatter": ("ring_reduce_scatter",),
    "all_gather": ("ring_all_gather",),
}
"""Paceline's algorithms for each collective. A function and its schedule have the same name."""
ZERO_COPY = "paceline zero-copy"
"""All-reduce of a tensor that is already in the group's shared memory, like the reducer's buckets."""


@dataclass(frozen=True)
class Variant:
    """An implementation of a collective, with its tensors for one size."""

    name: str
    """Name in the table: ``"ring"``, ``"gloo"``, ``"paceline"``."""
    source: Tensor
    """Input of this rank: the whole tensor, or only this rank's part."""
    run: Callable[[], object]
    """Run the collective once."""
    result: Tensor
    """Output of this rank: the whole tensor, or only this rank's part."""

    def load(self, values: Tensor) -> None:
        """Fill :attr:`source` from `values` of the whole tensor."""
        self.source.copy_(values if self.source.numel() == values.numel() else values[part_of_rank(values.numel())])


def part_of_rank(count: int) -> slice:
    """Return this rank's part of a tensor of `count` elements."""
    part = count // dist.get_world_size()
    return slice(dist.get_rank() * part, (dist.get_rank() + 1) * part)


@contextmanager
def variants(op: str, count: int, gloo: Any) -> Iterator[list[Variant]]:
    """Yield the implementations of `op` on `count` float32 values; `gloo` is a Gloo group of all ranks."""
    entries = [_ours(op, name, torch.zeros(count, dtype=torch.float32, device="cpu"), gloo) for name in OURS[op]]
    entries.append(_of_group(op, "gloo", torch.zeros(count, dtype=torch.float32, device="cpu"), gloo))
    entries.append(_of_group(op, "paceline", torch.zeros(count, dtype=torch.float32, device="cpu"), None))
    group = dist.group.WORLD
    with ExitStack() as stack:
        if op == "all_reduce" and isinstance(group, PacelineProcessGroup) and group.native:
            shared = group.allocate(count, torch.float32)
            stack.callback(group.free, shared)
            entries.append(_of_group(op, ZERO_COPY, shared, None))
        yield entries


def _ours(op: str, name: str, tensor: Tensor, gloo: Any) -> Variant:
    members = Members(gloo)
    schedule = build(name, members.size)
    short = name.removesuffix(f"_{op}").replace("_", "-")
    result = tensor[part_of_rank(tensor.numel())] if op == "reduce_scatter" else tensor
    # Do not call the public functions, which also compare arguments between ranks; this would be timed too.
    return Variant(short, tensor, lambda: execute(schedule, tensor, members), result)


def _of_group(op: str, name: str, tensor: Tensor, group: Any) -> Variant:
    """Return the collective `op` of `group`. Reduce-scatter and all-gather need a second tensor for a rank's part."""
    part = torch.zeros(tensor.numel() // dist.get_world_size(), dtype=torch.float32, device="cpu")
    # Since torch 2.13 the old names give a deprecation warning.
    reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    calls: dict[str, tuple[Tensor, Callable[[], object], Tensor]] = {
        "all_reduce": (tensor, lambda: dist.all_reduce(tensor, group=group), tensor),
        "broadcast": (tensor, lambda: dist.broadcast(tensor, 0, group=group), tensor),
        "reduce": (tensor, lambda: dist.reduce(tensor, 0, group=group), tensor),
        "reduce_scatter": (tensor, lambda: reduce_scatter(part, tensor, group=group), part),
        "all_gather": (part, lambda: all_gather(tensor, part, group=group), tensor),
    }
    return Variant(name, *calls[op])
