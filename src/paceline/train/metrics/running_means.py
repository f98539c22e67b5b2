"""Mean loss since the last line of metrics, and since the epoch began; a resumed run continues both."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from paceline.core.processes import consensus
from paceline.ddp import DistributedDataParallel
from paceline.train.metrics.reductions import all_sum


class LossAverage:
    """Sums of losses and weights.

    The sums since the last line are this rank's. The sums of the epoch, up to that line, are over all ranks.
    """

    def __init__(self, model: DistributedDataParallel) -> None:
        self._model = model
        # On the losses' device, so that the CPU waits for a GPU only when it logs; MPS has no float64.
        home = "cpu" if model.device.type == "mps" else model.device
        self._own = torch.zeros(2, dtype=torch.float64, device=home)  # loss and weight of this rank since the last line
        self._epoch = torch.zeros(2, dtype=torch.float64)  # loss and weight of all ranks, up to the last line
        self.line_at = 0
        """The step of the last line."""
        self.lr = 0.0
        """The learning rate that the last step used."""

    def add(self, loss: Tensor, weight: float | Tensor) -> None:
        """Add a micro-batch of this rank."""
        self._own[0] += loss.detach().squeeze().to(self._own.device)
        on_device = isinstance(weight, Tensor)  # a number would make the host wait for the device
        self._own[1] += torch.as_tensor(weight).detach().squeeze().to(self._own.device) if on_device else float(weight)

    def line(self, step: int) -> float:
        """Return the mean loss over all ranks since the last call, for the line of `step`. Collective."""
        self.line_at = step
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

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's sums. NaN is encoded as text."""
        return {
            # As text, which keeps every bit, also of NaN.
            "own": [value.hex() for value in self._own.tolist()],
            "epoch": [value.hex() for value in self._epoch.tolist()],
            "line_at": self.line_at,
            "lr": self.lr,
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Load this rank's sums."""
        self._load([saved], saved)

    def load_rank_states(self, states: Sequence[dict[str, Any]]) -> None:
        """Load the sums of all ranks of a run with another number of ranks; rank 0 gets their total."""
        # Also those of one rank: if each rank of now took them, they would count as many times.
        self._load(states if consensus.here().rank == 0 else [], states[0])

    def _load(self, own: Sequence[dict[str, Any]], shared: dict[str, Any]) -> None:
        sums = [[0.0, 0.0], *([float.fromhex(value) for value in state["own"]] for state in own)]
        self._own.copy_(torch.tensor(sums, dtype=torch.float64).sum(0))
        self._epoch.copy_(torch.tensor([float.fromhex(value) for value in shared["epoch"]], dtype=torch.float64))
        self.line_at, self.lr = int(shared["line_at"]), float(shared["lr"])
