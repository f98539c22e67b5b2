"""The second pass of a synchronized backward: gradients that came too late for their bucket, or belong to none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.ddp.engine.parts import EngineParts
from paceline.ddp.transport.channel import Channel, Launched, Pausing
from paceline.ddp.transport.sparse import as_dense, average_sparse


def run_second_pass(parts: EngineParts, local: Mapping[int, Tensor], scale: float) -> Pausing[dict[int, Tensor]]:
    """Average, on all ranks, the gradients that are in no bucket on some rank, by the control block.

    Args:
        parts: whose control block has been summed, and whose buckets hold averages.
        local: this rank's late deltas and sparse gradients, by parameter.
        scale: what sums over ranks are multiplied with.

    Returns:
        The averages that are in no bucket, by parameter. Where a bucket has a part of it, the rest was added there.
    """
    sparse, late = parts.control.second_pass()
    targets = {index: _target(parts, index) for index in late}
    if late:
        dense = {index: as_dense(local[index]) for index in late if index in local}
        launched = launch_late(dense, targets, parts.channel)
        yield True
        wait_for_late(launched, targets, scale, parts.channel)
    averages = {index: target for index, target in targets.items() if index in parts.storage.unbucketed}
    if sparse:
        averages |= yield from average_sparse(sparse, local, parts.parameters, parts.names, scale, parts.channel)
    return averages


def _target(parts: EngineParts, index: int) -> Tensor:
    """Return the tensor to which the sum of late deltas is added."""
    if index in parts.storage.unbucketed:
        return torch.zeros_like(parts.parameters[index].detach())
    return parts.storage.views[index]


@dataclass
class LateReduction:
    """One launched reduction: the deltas of `indices`, flat and one after the other."""

    indices: list[int]
    flat: Tensor
    launched: Launched


def launch_late(local: Mapping[int, Tensor], targets: Mapping[int, Tensor], channel: Channel) -> list[LateReduction]:
    """Launch the sums of the deltas for `targets`; this rank's are `local`. One sum for each dtype and device."""
    kinds: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for index, target in targets.items():
        kinds.setdefault((target.dtype, target.device), []).append(index)
    launched = []
    for same in kinds.values():
        parts = [local[index] if index in local else torch.zeros_like(targets[index]) for index in same]
        # Half precision is added up in single: a sum of N may overflow where the mean does not.
        dtype = torch.promote_types(targets[same[0]].dtype, torch.float32)
        flat = torch.cat([part.detach().reshape(-1).to(dtype) for part in parts])
        launched.append(LateReduction(same, flat, channel.all_reduce(flat)))
    return launched


def wait_for_late(
    launched: Sequence[LateReduction], targets: Mapping[int, Tensor], scale: float, channel: Channel
) -> None:
    """Wait for the sums and add them, scaled, to the averages in `targets`."""
    for reduction in launched:
        channel.meet(reduction.launched, "all-reduce of late gradients")
        offset = 0
        for index in reduction.indices:
            target = targets[index]
            target.add_(reduction.flat[offset : offset + target.numel()].view(target.shape), alpha=scale)
            offset += target.numel()
