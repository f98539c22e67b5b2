"""The second pass of a synchronized backward: what came too late for its bucket, or has no place in one."""

from __future__ import annotations

from collections.abc import Generator, Mapping

import torch
from torch import Tensor

from paceline.ddp.backward import Gear
from paceline.ddp.late import launch_late, settle_late
from paceline.ddp.sparse import as_dense, average_sparse


def average_apart(gear: Gear, mine: Mapping[int, Tensor], scale: float) -> Generator[bool, None, dict[int, Tensor]]:
    """Average, on all ranks alike, what the control block says is in no bucket on some rank.

    Pauses, by yielding ``True``, where something was launched and other wrappers may go first.

    Args:
        gear: whose control block has been summed, and whose buckets hold averages.
        mine: this rank's late deltas and sparse gradients, by parameter.
        scale: what sums over ranks are multiplied with.

    Returns:
        The averages that are in no bucket, by parameter. Where a bucket has a part of it, the rest was added there.
    """
    sparse, late = gear.control.apart()
    targets = {index: _target(gear, index) for index in late}
    if late:
        dense = {index: as_dense(mine[index]) for index in late if index in mine}
        launched = launch_late(dense, targets, gear.channel)
        yield True
        settle_late(launched, targets, scale, gear.channel)
    averages = {index: target for index, target in targets.items() if index in gear.storage.outside}
    if sparse:
        averages |= yield from average_sparse(sparse, mine, gear.parameters, gear.names, scale, gear.channel)
    return averages


def _target(gear: Gear, index: int) -> Tensor:
    """Where the sum of late deltas is added."""
    if index in gear.storage.outside:
        return torch.zeros_like(gear.parameters[index].detach())
    return gear.storage.views[index]
