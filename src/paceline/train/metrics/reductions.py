"""Collectives of a training run: sums of metrics, and a check that all ranks work on the same data."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.core.processes.missing_ranks import called_by_all, collective
from paceline.core.state.data_position import Origin, difference
from paceline.data import DataLoader
from paceline.ddp import DistributedDataParallel
from paceline.errors import DesyncError


def check_same_data(loader: DataLoader, model: DistributedDataParallel, epoch: int | None = None) -> None:
    """Compare the data, and the order of `epoch` unless that is None, over the model's ranks. Collective.

    Every synchronized backward also compares them. But an evaluation has no backward, and a checkpoint may be loaded
    before training.
    """
    size, rank = dist.get_world_size(model.process_group), dist.get_rank(model.process_group)
    if size == 1:
        return
    rows = torch.zeros(size, len(Origin._fields), dtype=torch.float64)
    if loader.progress.world_size == size:
        # All ranks compare the same loader here, even if they created it at different places.
        rows[rank] = torch.tensor(loader.progress.origin_in(epoch)._replace(source=0), dtype=torch.float64)
    else:  # a loader for other ranks; it takes part, because the sum is a collective
        rows[rank] = -1
    told = all_sum(rows, model, "the comparison of data").tolist()
    if found := difference({rank: Origin(*map(int, row)) for rank, row in enumerate(told)}):
        raise DesyncError(found)


def all_sum(values: Tensor, model: DistributedDataParallel, call: str = "the evaluation") -> Tensor:
    """Return the sum over the model's ranks of `values`, a small float64 vector; a new one, on the CPU."""
    # On the CPU where the group has a backend for it; a group of NCCL alone takes its devices' tensors only.
    on_cpu = "cpu:" in str(dist.get_backend_config(model.process_group))
    total = values.to("cpu" if on_cpu else model.device, copy=True)
    if dist.get_world_size(model.process_group) > 1:
        with called_by_all(call), collective("sum over ranks", model.process_group):
            dist.all_reduce(total, group=model.process_group)
    return total.cpu()
