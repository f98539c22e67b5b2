"""Muon, an optimizer for weight matrices, with AdamW for all other parameters.

A matrix moves along its momentum made orthogonal, so that every direction is learnt at the same speed, also those whose
gradient is small. Keller Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

NEWTON_SCHULZ_STEPS = 5
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Coefficients of the quintic whose iteration brings singular values between 0 and 1 close to 1 (source above)."""


EPSILON = 1e-10
"""AdamW's: small, because gradients of rare tokens are."""


class Muon(torch.optim.Optimizer):
    """Trains `matrices` by Muon, and `others` by AdamW without weight decay.

    A parameter of more than two dimensions is a stack of matrices.

    Args:
        matrices: the weights of hidden layers.
        others: embeddings, the output layer, gains.
        lr: learning rate of the matrices: the spectral norm of a step, for a square one.
        other_lr: that of the other parameters.
        momentum: of the matrices, with Nesterov's look ahead.
        betas: of AdamW.
        weight_decay: of the matrices.
    """

    def __init__(
        self,
        matrices: Iterable[nn.Parameter],
        others: Iterable[nn.Parameter],
        lr: float = 0.02,
        other_lr: float = 0.003,
        *,
        momentum: float = 0.95,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.1,
    ) -> None:
        groups: list[dict[str, Any]] = [
            {"params": list(matrices), "orthogonal": True, "lr": lr, "betas": (momentum, 0.0)},
            {"params": list(others), "orthogonal": False, "lr": other_lr, "betas": betas, "weight_decay": 0.0},
        ]
        super().__init__(groups, {"weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Take one step."""
        for group in self.param_groups:
            update = self._muon if group["orthogonal"] else self._adam
            for parameter in group["params"]:
                if parameter.grad is not None:
                    update(parameter, parameter.grad, self.state[parameter], group)

    def _muon(self, parameter: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if not state:
            state["momentum"] = torch.zeros_like(parameter)
        beta, _ = group["betas"]
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        momentum = state["momentum"].lerp_(gradient, 1 - beta)
        rows, columns = parameter.shape[-2:]
        direction = orthogonal(gradient.lerp(momentum, beta)) * max(1.0, rows / columns) ** 0.5
        parameter.sub_(direction, alpha=group["lr"])

    def _adam(self, parameter: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if not state:
            state["step"] = torch.zeros((), device=parameter.device)
            state.update(mean=torch.zeros_like(parameter), square=torch.zeros_like(parameter))
        beta1, beta2 = group["betas"]
        adamw(
            [parameter],
            [gradient],
            [state["mean"]],
            [state["square"]],
            [],
            [state["step"]],
            fused=True,
            amsgrad=False,
            maximize=False,
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            weight_decay=0.0,
            eps=EPSILON,
        )


def orthogonal(matrix: Tensor) -> Tensor:
    """Return the matrix of the same singular vectors as `matrix`, (…, m, n), whose singular values are all about 1."""
    if matrix.shape[-2] > matrix.shape[-1]:
        return orthogonal(matrix.mT).mT
    linear, cubic, quintic = COEFFICIENTS
    x: Tensor = (matrix / (matrix.norm(dim=(-2, -1), keepdim=True) + 1e-7)).reshape(-1, *matrix.shape[-2:])
    for _ in range(NEWTON_SCHULZ_STEPS):
        square = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(square, square, square, beta=cubic, alpha=quintic), x, beta=linear)
    return x.view_as(matrix)
