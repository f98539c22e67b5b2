"""Metrics of a training run: mean losses that a resumed run continues, and sums over ranks with the same data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.core import consensus
from paceline.core.data_position import Origin, difference
from paceline.core.missing_ranks import called_by_all, collective
from paceline.core.virtual_ranks import slices_of_rank
from paceline.data import DataLoader
from paceline.ddp import DistributedDataParallel
from paceline.errors import DesyncError


class LossAverage:
    """Sums of losses and weights: of this rank since the last line, and of all ranks in the epoch before that line.

    With virtual ranks, sums are kept per slice, so that their total is bit-identical on any number of ranks.
    """

    def __init__(self, model: DistributedDataParallel, ranks: dist.ProcessGroup | None = None) -> None:
        self._model, self._ranks = model, ranks or model.process_group
        slices, group = model.virtual_ranks, model.process_group
        self._rows = range(1)
        """The rows of this rank's slices; one row without virtual ranks."""
        if slices is not None:
            self._rows = slices_of_rank(slices, dist.get_rank(group), dist.get_world_size(group))
        # Keep sums on the device of the losses, so that the CPU waits for a GPU only when it logs. MPS lacks float64.
        home = "cpu" if model.device.type == "mps" else model.device
        # Loss and weight since the last line; rows of other ranks stay zero.
        self._own = torch.zeros(slices or 1, 2, dtype=torch.float64, device=home)
        # Loss and weight of all ranks, up to the last line.
        self._epoch = torch.zeros(2, dtype=torch.float64, device="cpu")
        self.line_at = 0
        """The step of the last line."""
        self.lr = 0.0
        """The learning rate used in the last step."""

    def add(self, loss: Tensor, weight: float | Tensor, slice_number: int = 0) -> None:
        """Add a micro-batch of this rank. With virtual ranks, `slice_number` is its index in the rank's slices."""
        sums = self._own[self._rows[slice_number]]
        sums[0] += loss.detach().squeeze().to(sums.device)
        # A tensor is not converted to a number, because the host would wait for the device.
        sums[1] += weight.detach().squeeze().to(sums.device) if isinstance(weight, Tensor) else float(weight)

    def line(self, step: int) -> float:
        """Return the mean loss over all ranks since the last call, for the line of `step`. Collective."""
        self.line_at = step
        sums = all_sum(self._own, self._model, self._ranks).sum(0)
        self._epoch += sums
        self._own.zero_()
        return float(sums[0] / sums[1])

    def epoch(self) -> float:
        """Return the mean loss over the epoch, up to the last line."""
        return float(self._epoch[0] / self._epoch[1])

    def restart(self) -> None:
        """Begin an epoch."""
        self._own.zero_()
        self._epoch.zero_()

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's sums."""
        return {
            "own": self._own.flatten().tolist(),
            "epoch": self._epoch.tolist(),
            "line_at": self.line_at,
            "lr": self.lr,
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Load this rank's sums."""
        self._load(_rows_in(saved), saved)

    def load_rank_states(self, states: Sequence[dict[str, Any]]) -> None:
        """Load the sums of a run that had a different number of ranks."""
        # Without virtual ranks, only rank 0 takes the total, so that it counts once.
        total, rows = torch.stack([_rows_in(state) for state in states]).sum(0), self._rows
        if len(total) == 1:
            rows = range(int(consensus.here().rank == 0))
        restored = torch.zeros_like(total)
        restored[rows.start : rows.stop] = total[rows.start : rows.stop]
        self._load(restored, states[0])

    def _load(self, sums: Tensor, shared: dict[str, Any]) -> None:
        self._own.copy_(sums)
        self._epoch.copy_(torch.tensor(shared["epoch"], dtype=torch.float64, device="cpu"))
        self.line_at, self.lr = int(shared["line_at"]), float(shared["lr"])


def _rows_in(saved: dict[str, Any]) -> Tensor:
    return torch.tensor(saved["own"], dtype=torch.float64, device="cpu").view(-1, 2)


def ranks_of(loader: DataLoader, model: DistributedDataParallel) -> dist.ProcessGroup:
    """Return the group that `loader` splits its samples among: the model's, or all ranks if the model is an island."""
    size, world = loader.progress.world_size, dist.group.WORLD
    is_island = dist.get_world_size(model.process_group) != size == dist.get_world_size()
    return world if is_island and world is not None else model.process_group


def all_sum(
    values: Tensor, model: DistributedDataParallel, ranks: dist.ProcessGroup, call: str = "the evaluation"
) -> Tensor:
    """Return the sum of the float64 `values` over `ranks`, on the CPU."""
    # On the CPU if the group has a CPU backend; a group with only NCCL needs device tensors.
    on_cpu = "cpu:" in str(dist.get_backend_config(ranks))
    total = values.to("cpu" if on_cpu else model.device, copy=True)
    if dist.get_world_size(ranks) > 1:
        with called_by_all(call), collective("sum over ranks", ranks):
            dist.all_reduce(total, group=ranks)
    return total.cpu()


def check_same_data(loader: DataLoader, model: DistributedDataParallel, epoch: int | None = None) -> None:
    """Check that :func:`ranks_of` have the same data, in the same order in `epoch` if one is given. Collective.

    Synchronized backward passes make the same check, but an evaluation has no backward pass, and a checkpoint may be
    loaded before the first backward pass.
    """
    ranks = ranks_of(loader, model)
    size, rank = dist.get_world_size(ranks), dist.get_rank(ranks)
    if size == 1:
        return
    rows = torch.zeros(size, len(Origin._fields), dtype=torch.float64, device="cpu")
    if loader.progress.world_size == size:
        # source=0, because ranks may have created the loader on different lines of code.
        origin = loader.progress.origin_in(epoch, model.virtual_ranks)._replace(source=0)
        rows[rank] = torch.tensor(origin, dtype=torch.float64, device="cpu")
    else:  # the loader belongs to a different set of ranks; this rank only takes part in the collective
        rows[rank] = -1
    origins = all_sum(rows, model, ranks, "the comparison of data").tolist()
    if message := difference({rank: Origin(*map(int, row)) for rank, row in enumerate(origins)}):
        raise DesyncError(message)
