"""The second pass: averages gradients that are sparse or arrived too late for a bucket.

The control block lists the affected parameters.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from paceline.ddp.consistency.module_changes import Trained
from paceline.ddp.reducer.backward import Backward
from paceline.ddp.reducer.bucket_set import BucketSet
from paceline.ddp.reducer.extension import Exchanged, Extension
from paceline.ddp.transport.channel import Channel, Pausing
from paceline.ddp.transport.sparse import as_dense, average_sparse


class OutOfBucket(Extension):
    """Averages the gradients outside the buckets on all ranks, after the buckets are averaged."""

    def __init__(self, trained: Trained, buckets: BucketSet, channel: Channel) -> None:
        self._trained, self._buckets, self._channel = trained, buckets, channel

    def after_averages(self, backward: Backward, exchanged: Exchanged) -> Pausing[None]:
        """Average late deltas and sparse gradients; a late delta is added to the average in its bucket."""
        sparse, late = exchanged.control.second_pass()
        # All ranks read the same lists from the summed block; a rank without such a gradient contributes zeros.
        trained, local, scale = self._trained, backward.out_of_bucket, exchanged.scale
        targets = {index: self._target(index) for index in late}
        if late:
            dense = {index: as_dense(local[index]) for index in late if index in local}
            yield from _add_late(dense, targets, scale, self._channel)
        averages = {index: target for index, target in targets.items() if index in self._buckets.unbucketed}
        if sparse:
            pending = average_sparse(sparse, local, trained.parameters, trained.names, scale, self._channel)
            averages |= yield from pending
        backward.out_of_bucket_averages = averages

    def _target(self, index: int) -> Tensor:
        """Return the tensor that holds the sum of late deltas."""
        if index in self._buckets.unbucketed:
            return torch.zeros_like(self._trained.parameters[index].detach())
        return self._buckets.views[index]


def _add_late(
    local: Mapping[int, Tensor], targets: Mapping[int, Tensor], scale: float, channel: Channel
) -> Pausing[None]:
    """Sum the ranks' deltas (`local` holds this rank's), scale them, and add them to the averages in `targets`."""
    kinds: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for index, target in targets.items():
        kinds.setdefault((target.dtype, target.device), []).append(index)
    launched = []
    for same in kinds.values():
        parts = [local[index] if index in local else torch.zeros_like(targets[index]) for index in same]
        # Sum half precision in single precision: the sum over N ranks may overflow even if the mean does not.
        dtype = torch.promote_types(targets[same[0]].dtype, torch.float32)
        flat = torch.cat([part.detach().reshape(-1).to(dtype) for part in parts])
        launched.append((same, flat, channel.all_reduce(flat)))
    yield True
    for same, flat, work in launched:
        channel.meet(work, "all-reduce of late gradients")
        sums = flat.split([targets[index].numel() for index in same])
        for index, total in zip(same, sums, strict=True):
            targets[index].add_(total.view(targets[index].shape), alpha=scale)
