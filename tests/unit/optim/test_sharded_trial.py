"""Optimizers that look at more than one element or tensor are refused by a sharded optimizer; others are not."""

from __future__ import annotations

from itertools import count
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

from paceline.errors import UsageError
from paceline.optim import ShardedOptimizer


class Own(torch.optim.Optimizer):
    """An optimizer that is not torch's; a subclass says by how much it changes a parameter."""

    def __init__(self, params: Any, lr: float = 0.1, **settings: Any) -> None:
        super().__init__(params, {"lr": lr, **settings})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            trained = [each for each in group["params"] if each.grad is not None]
            self.prepare(group, trained)
            for parameter in trained:
                parameter.sub_(self.change(parameter, parameter.grad, group), alpha=group["lr"])

    def prepare(self, group: dict[str, Any], trained: list[Tensor]) -> None:
        """Look at all parameters."""

    def change(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> Tensor:
        return gradient


class Clipping(Own):
    """Clips by the norm of all gradients, as Adan does."""

    def prepare(self, group: dict[str, Any], trained: list[Tensor]) -> None:
        most = group.get("max_grad_norm")
        norm = torch.stack([each.grad.norm() for each in trained]).norm()  # type: ignore[union-attr]
        self.factor = 1.0 if most is None else min(1.0, most / float(norm))

    def change(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> Tensor:
        return gradient * self.factor


class Growing(Own):
    """Has a common step size, tiny at first, as Prodigy has."""

    def prepare(self, group: dict[str, Any], trained: list[Tensor]) -> None:
        self.size = getattr(self, "size", 1e-6)
        firsts = [self.state[each].setdefault("first", each.clone()) for each in trained]
        progress = sum(
            float((one - each).flatten() @ each.grad.flatten()) for one, each in zip(firsts, trained, strict=True)
        )  # type: ignore[union-attr]
        self.size = max(self.size, progress / sum(float(each.grad.abs().sum()) for each in trained))  # type: ignore[union-attr]

    def change(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> Tensor:
        return gradient.sign() * self.size


class InSettings(Own):
    """Keeps in its settings what all gradients have in common."""

    def prepare(self, group: dict[str, Any], trained: list[Tensor]) -> None:
        group["size"] = sum(float(each.grad.abs().sum()) for each in trained)  # type: ignore[union-attr]


class ByPlace(Own):
    """Treats parameters by their place in the list."""

    def prepare(self, group: dict[str, Any], trained: list[Tensor]) -> None:
        self.places = count(1)

    def change(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> Tensor:
        return gradient * next(self.places)


class ByVectors(Own):
    """Divides by the norm of all vectors."""

    def prepare(self, group: dict[str, Any], trained: list[Tensor]) -> None:
        vectors = [each.grad.flatten() for each in trained if each.dim() == 1]  # type: ignore[union-attr]
        self.size = torch.cat(vectors).norm() if vectors else 1.0

    def change(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> Tensor:
        return gradient / self.size if gradient.dim() == 1 else gradient


class Random(Own):
    """Adds noise to gradients."""

    def change(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> Tensor:
        return gradient * torch.rand_like(gradient)


class Holding(Own):
    """Lets another optimizer step, as Lookahead does."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.held = SGD([nn.Parameter(torch.zeros(1))], lr=0.1)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.held.step()


class Marked(Own):
    """Has factors for parameters that are marked."""

    def change(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> Tensor:
        return gradient * getattr(parameter, "factor", 1.0)


class AsNumbers(Own):
    """Keeps a step count and two momenta in a dict, element by element."""

    def change(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> Tensor:
        state = self.state[parameter]
        state["step"] = state.get("step", 0) + 1
        buffers = state.setdefault("buffers", {beta: torch.zeros_like(parameter) for beta in (0.5, 0.9)})
        return sum(each.mul_(beta).add_(gradient) for beta, each in buffers.items()) / state["step"]  # type: ignore[return-value]


class Failing(Own):
    def change(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> Tensor:
        raise LookupError("give a closure")


def refused(make: Any) -> str:
    with pytest.raises(UsageError) as caught:
        make()
    return str(caught.value)


@pytest.mark.parametrize(
    ("kind", "settings", "is_separable"),
    [
        (Clipping, {"max_grad_norm": 0.05}, False),
        (Clipping, {"max_grad_norm": 50.0}, False),
        (Clipping, {}, True),
        (Growing, {}, False),
        (InSettings, {}, False),
        (ByPlace, {}, False),
        (ByVectors, {}, False),
        (Random, {}, False),
        (AsNumbers, {}, True),
        (torch.optim.Adafactor, {}, True),
    ],
)
def test_a_trial_tells_whether_ranks_can_update_tensors_separately(
    kind: Any, settings: dict[str, Any], is_separable: bool
) -> None:
    net = nn.Sequential(nn.Conv2d(2, 2, 2), nn.Linear(4, 4))
    if is_separable:
        assert ShardedOptimizer(net, kind, by="tensor", **settings).optimizer_class is kind
    else:
        assert "use it without ShardedOptimizer" in refused(
            lambda: ShardedOptimizer(net, kind, by="tensor", **settings)
        )


def test_a_trial_uses_the_numbers_of_dimensions_of_the_parameters() -> None:
    # ByVectors ties vectors together and Muon refuses them, so a trial that has one would refuse both.
    matrix = nn.Linear(4, 4, bias=False)
    for kind in (ByVectors, torch.optim.Muon):
        assert ShardedOptimizer(matrix, kind, by="tensor").optimizer_class is kind
    assert "gives different results" in refused(lambda: ShardedOptimizer(nn.Linear(4, 4), ByVectors, by="tensor"))
    with pytest.raises(ValueError, match=r"Muon only supports 2D parameters .*\[4\]"):
        ShardedOptimizer(nn.Linear(4, 4), torch.optim.Muon, by="tensor")


def test_marks_of_parameters_reach_the_optimizer() -> None:
    net = nn.Linear(4, 4)
    net.weight.factor = 0.0  # type: ignore[assignment]
    before = net.weight.clone(), net.bias.clone()
    optimizer = ShardedOptimizer(net, Marked, by="tensor")
    net(torch.ones(4)).sum().backward()
    optimizer.step()
    assert torch.equal(net.weight, before[0])
    assert not torch.equal(net.bias, before[1])


def test_settings_count_wherever_they_are_given() -> None:
    net = nn.Linear(4, 4)
    clipped = [{"params": [net.weight]}, {"params": [net.bias], "max_grad_norm": 0.1}]
    for make in (
        lambda: ShardedOptimizer(clipped, Clipping, by="tensor"),
        lambda: ShardedOptimizer([net.weight], Clipping, by="tensor").add_param_group(dict(clipped[1])),
    ):
        assert "gives different results" in refused(make)


def test_a_class_that_cannot_be_tried_is_refused() -> None:
    net = nn.Linear(4, 4)
    assert refused(lambda: ShardedOptimizer(net, Failing, by="tensor")) == (
        "Failing could not be tried on small tensors: it raised LookupError: give a closure; "
        "use it without ShardedOptimizer"
    )
    # The inner optimizer would train whole parameters on every rank.
    assert "the step changed nothing" in refused(lambda: ShardedOptimizer(net, Holding, by="tensor"))
