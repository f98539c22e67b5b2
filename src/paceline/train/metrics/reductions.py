"""Collectives of a training run: sums metrics over ranks, and checks that ranks have the same data."""

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
    """Check that the model's ranks have the same data, in the same order in `epoch` if one is given. Collective.

    Synchronized backward passes make the same check, but an evaluation has no backward pass, and a checkpoint may be
    loaded before the first backward pass.
    """
    size, rank = dist.get_world_size(model.process_group), dist.get_rank(model.process_group)
    if size == 1:
        return
    rows = torch.zeros(size, len(Origin._fields), dtype=torch.float64, device="cpu")
    if loader.progress.world_size == size:
        # source=0, because ranks may have created the loader on different lines of code.
        origin = loader.progress.origin_in(epoch, model.virtual_ranks)._replace(source=0)
        rows[rank] = torch.tensor(origin, dtype=torch.float64, device="cpu")
    else:  # the loader belongs to a different set of ranks; this rank only takes part in the collective
        rows[rank] = -1
    origins = all_sum(rows, model, "the comparison of data").tolist()
    if message := difference({rank: Origin(*map(int, row)) for rank, row in enumerate(origins)}):
        raise DesyncError(message)


def all_sum(values: Tensor, model: DistributedDataParallel, call: str = "the evaluation") -> Tensor:
    """Return the sum of the float64 `values` over the model's ranks, on the CPU."""
    # On the CPU if the group has a CPU backend; a group with only NCCL needs device tensors.
    on_cpu = "cpu:" in str(dist.get_backend_config(model.process_group))
    total = values.to("cpu" if on_cpu else model.device, copy=True)
    if dist.get_world_size(model.process_group) > 1:
        with called_by_all(call), collective("sum over ranks", model.process_group):
            dist.all_reduce(total, group=model.process_group)
    return total.cpu()
