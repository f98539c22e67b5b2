"""Mean loss since the last line of metrics, and since the epoch began; a resumed run continues both."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from paceline import rank_consensus
from paceline.ddp import DistributedDataParallel
from paceline.train.agreement import all_sum


class LossAverage:
    """Sums of losses and weights.

    Since the last line they are those of this rank; for the epoch, up to that line, those of all ranks.
    """

    def __init__(self, model: DistributedDataParallel) -> None:
        self._model = model
        # Where the losses are, so that the CPU waits for a GPU only when it logs; MPS has no float64.
        home = "cpu" if model.device.type == "mps" else model.device
        self._own = torch.zeros(2, dtype=torch.float64, device=home)  # loss and weight of this rank since the last line
        self._epoch = torch.zeros(2, dtype=torch.float64)  # loss and weight of all ranks, up to the last line
        self._every_rank: list[list[str]] = []  # what each rank had of its own at the last save; NaN has a text, too

    def add(self, loss: Tensor, weight: float | Tensor) -> None:
        """Add a micro-batch of this rank."""
        self._own[0] += loss.detach().squeeze().to(self._own.device)
        on_device = isinstance(weight, Tensor)  # where a number would stop the host
        self._own[1] += torch.as_tensor(weight).detach().squeeze().to(self._own.device) if on_device else float(weight)

    def line(self) -> float:
        """Return the mean loss over all ranks since the last call. Collective."""
        sums = all_sum(self._own, self._model)
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

    def gather(self) -> None:
        """Gather every rank's sums, to be saved. Collective."""
        self._every_rank = rank_consensus.gather(rank_consensus.here(), [value.hex() for value in self._own.tolist()])

    def state_dict(self) -> dict[str, Any]:
        """Return the sums as of :meth:`gather`; the same on every rank."""
        return {"own": self._every_rank, "epoch": self._epoch.tolist()}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Load saved sums; with another number of ranks, rank 0 takes those of all ranks."""
        here = rank_consensus.here()
        ranks = [[float.fromhex(value) for value in own_sums] for own_sums in saved["own"]]
        own_sums = [0.0, 0.0]
        if len(ranks) == here.size:
            own_sums = ranks[here.rank]
        elif here.rank == 0 and ranks:
            own_sums = [sum(values) for values in zip(*ranks, strict=True)]
        self._own.copy_(torch.tensor(own_sums, dtype=torch.float64))
        self._epoch.copy_(torch.tensor(saved["epoch"], dtype=torch.float64))
        self._every_rank = saved["own"]
