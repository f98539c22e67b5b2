"""Ranks agree on their data before anything is done with it."""

from __future__ import annotations

import torch
import torch.distributed as dist

from paceline.data import DataLoader
from paceline.ddp import DistributedDataParallel
from paceline.errors import DesyncError
from paceline.sources import Origin, difference
from paceline.train.sums import all_sum


def expect_same_data(loader: DataLoader, model: DistributedDataParallel, epoch: int | None = None) -> None:
    """Compare the data and, unless `epoch` is None, the order of that epoch over the model's ranks. Collective.

    Every synchronized backward compares them, too, but an evaluation has none, and before training a checkpoint may be
    loaded.

    Raises:
        DesyncError: on every rank alike; says what differs, and the usual cause.
    """
    size, rank = dist.get_world_size(model.process_group), dist.get_rank(model.process_group)
    if size == 1:
        return
    rows = torch.zeros(size, len(Origin._fields), dtype=torch.float64)
    if loader.progress.world_size == size:
        # Here all ranks speak of the same loader, wherever they made it.
        rows[rank] = torch.tensor(loader.progress.origin_in(epoch)._replace(source=0), dtype=torch.float64)
    else:
        rows[rank] = -1
    told = all_sum(rows, model).tolist()
    if found := difference({rank: Origin(*map(int, row)) for rank, row in enumerate(told)}):
        raise DesyncError(found)
