"""A schedule-free optimizer: SGD of Defazio et al., "The Road Less Scheduled", 2024."""

from __future__ import annotations

from typing import Any

import torch


class ScheduleFree(torch.optim.Optimizer):
    """Parameters hold the point of the gradients after :meth:`train`, and the average after :meth:`eval`."""

    def __init__(self, params: Any, lr: float = 0.1, beta: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "beta": beta, "count": 0, "is_training": False})

    @torch.no_grad()
    def _switch(self, is_training: bool) -> None:
        for group in self.param_groups:
            if group["is_training"] != is_training:
                weight = 1 - group["beta"] if is_training else 1 - 1 / group["beta"]
                for parameter in group["params"]:
                    if "z" in self.state[parameter]:
                        parameter.lerp_(self.state[parameter]["z"], weight)
                group["is_training"] = is_training

    def train(self) -> None:
        self._switch(True)

    def eval(self) -> None:
        self._switch(False)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            if not group["is_training"]:
                raise RuntimeError("call train() before a step")
            share = 1 / (group["count"] + 1)
            for parameter in group["params"]:
                if parameter.grad is not None:
                    z = self.state[parameter].setdefault("z", parameter.detach().clone())
                    parameter.lerp_(z, share)
                    parameter.add_(parameter.grad, alpha=group["lr"] * (group["beta"] * (1 - share) - 1))
                    z.sub_(parameter.grad, alpha=group["lr"])
            group["count"] += 1
