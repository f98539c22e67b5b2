"""Every way to do a collective that is measured: our algorithms, Gloo's own, and the shared-memory group's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.comm import algorithms
from paceline.comm.c10d.process_group import PacelineProcessGroup

OURS: dict[str, tuple[str, ...]] = {
    "all_reduce": ("ring_all_reduce", "tree_all_reduce", "halving_doubling_all_reduce"),
    "broadcast": ("linear_broadcast", "tree_broadcast", "scatter_all_gather_broadcast"),
    "reduce": ("linear_reduce", "tree_reduce"),
    "reduce_scatter": ("ring_reduce_scatter",),
    "all_gather": ("ring_all_gather",),
}
"""The algorithms of each collective, by the name of function and schedule."""
ZERO_COPY = "paceline zero-copy"
"""The group's all-reduce of a tensor that lies in shared memory, where the reducer's buckets lie."""


@dataclass(frozen=True)
class Variant:
    """One way to do a collective, on one size."""

    name: str
    """Name in the table: ``"ring"``, ``"gloo"``, ``"paceline"``."""
    schedule: str | None
    """Name of the schedule of an algorithm of ours, for the model."""
    source: Tensor
    """The tensor that a rank begins with: the whole one, or its own part of it."""
    run: Callable[[], object]
    """Function that carries out the collective once."""
    result: Tensor
    """The tensor that then holds this rank's result: the whole one, or its own part of it."""

    def load(self, values: Tensor) -> None:
        """Fill :attr:`source` from `values`, which are those of the whole tensor."""
        self.source.copy_(values if self.source.numel() == values.numel() else values[own_part(values.numel())])


def own_part(count: int) -> slice:
    """Return this rank's part of a tensor of `count` elements."""
    part = count // dist.get_world_size()
    return slice(dist.get_rank() * part, (dist.get_rank() + 1) * part)


def variants(op: str, count: int, backends: Sequence[str], gloo: Any) -> list[Variant]:
    """Return the ways to do `op` on `count` float32; `gloo` is a group beside the world's own, which is ours."""
    made: list[Variant] = []
    if "algorithms" in backends:
        made += [_ours(op, name, torch.zeros(count), gloo) for name in OURS[op]]
    if "gloo" in backends:
        made.append(_of_group(op, "gloo", torch.zeros(count), gloo))
    if "paceline" in backends:
        made.append(_of_group(op, "paceline", torch.zeros(count), None))
        if op == "all_reduce" and (group := _shared_memory()) is not None:
            made.append(_of_group(op, ZERO_COPY, group.allocate(count, torch.float32), None))
    return made


def release(made: Sequence[Variant]) -> None:
    """Give the shared memory of these variants back."""
    for variant in made:
        if variant.name == ZERO_COPY and (group := _shared_memory()) is not None:
            group.free(variant.source)


def _shared_memory() -> PacelineProcessGroup | None:
    group = dist.group.WORLD
    return group if isinstance(group, PacelineProcessGroup) and group.native else None


def _ours(op: str, name: str, tensor: Tensor, gloo: Any) -> Variant:
    function = getattr(algorithms, name)
    short = name.removesuffix(f"_{op}").replace("_", "-")
    result = tensor[own_part(tensor.numel())] if op == "reduce_scatter" else tensor
    # Without the check that ranks agree on the tensor, which is a collective of its own and would be timed, too.
    return Variant(short, name, tensor, lambda: function(tensor, group=gloo, check=False), result)


def _of_group(op: str, name: str, tensor: Tensor, group: Any) -> Variant:
    """Return the collective of `group` itself; reduce-scatter and all-gather have a second tensor for the part."""
    if op == "reduce_scatter":
        part = torch.zeros(tensor.numel() // dist.get_world_size())
        return Variant(name, None, tensor, lambda: dist.reduce_scatter_tensor(part, tensor, group=group), part)
    if op == "all_gather":
        part = torch.zeros(tensor.numel() // dist.get_world_size())
        return Variant(name, None, part, lambda: dist.all_gather_into_tensor(tensor, part, group=group), tensor)
    calls: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: dist.all_reduce(tensor, group=group),
        "broadcast": lambda: dist.broadcast(tensor, 0, group=group),
        "reduce": lambda: dist.reduce(tensor, 0, group=group),
    }
    return Variant(name, None, tensor, calls[op], tensor)
