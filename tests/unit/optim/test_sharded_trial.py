"""Optimizers that look at more than one element or tensor are refused by a sharded optimizer; others are not."""

from __future__ import annotations

from collections import deque
from functools import partial
from itertools import count
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, Adam

import paceline
from paceline.core.processes.world import World
from paceline.errors import UsageError
from paceline.optim import ShardedOptimizer
from paceline.optim.elementwise import find_difference
from schedule_free import ScheduleFree
from twins import Pools


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


class Projecting(Own):
    """Removes the part of a gradient along the rows of a matrix if that part is small, as SGDP does."""

    def change(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> Tensor:
        if (
            parameter.dim() < 2
            or F.cosine_similarity(parameter, gradient).abs().max() > 0.1 / parameter.shape[1] ** 0.5
        ):
            return gradient
        unit = F.normalize(parameter)
        return gradient - unit * (unit * gradient).sum(1, keepdim=True)


class Late(Own):
    """Divides by the largest of gradients of ten steps before, as AdaShift does."""

    def change(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> Tensor:
        kept = self.state[parameter].setdefault("kept", deque(maxlen=10))
        size = kept[0].abs().max() if len(kept) == 10 else 1.0
        kept.append(gradient.clone())
        return gradient / size


class NeverShown(Own):
    """Keeps a norm that acts only later, as SWATS does."""

    def change(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> Tensor:
        self.state[parameter]["norm"] = gradient.norm()
        return gradient


class Preconditioned(Own):
    """Keeps a matrix for the rows that acts only later, as Shampoo does."""

    def change(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> Tensor:
        self.state[parameter]["rows"] = torch.eye(parameter.shape[0])
        return gradient


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


class Centering(Own):
    """Centers the gradients of convolutions alone, as Ranger can."""

    def change(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> Tensor:
        return gradient - gradient.mean((1, 2, 3), keepdim=True) if gradient.dim() == 4 else gradient


class ByVectors(Own):
    """Divides by the norm of all vectors."""

    def prepare(self, group: dict[str, Any], trained: list[Tensor]) -> None:
        vectors = [each.grad.flatten() for each in trained if each.dim() == 1]  # type: ignore[union-attr]
        self.size = torch.cat(vectors).norm() if vectors else 1.0

    def change(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> Tensor:
        return gradient / self.size if gradient.dim() == 1 else gradient


class Holding(Own):
    """Lets another optimizer step, as Lookahead does."""

    def __init__(self, params: Any) -> None:
        self.held = SGD(params, lr=0.1)
        super().__init__(self.held.param_groups)

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


@pytest.mark.parametrize(
    ("kind", "settings", "by_element", "by_tensor"),
    [
        (Clipping, {"max_grad_norm": 0.05}, False, False),
        (Clipping, {"max_grad_norm": 50.0}, False, False),
        (Clipping, {}, True, True),
        (Growing, {}, False, False),
        (Projecting, {}, False, True),
        (Late, {}, False, True),
        (NeverShown, {}, False, True),
        (Preconditioned, {}, False, True),
        (InSettings, {}, False, False),
        (ByPlace, {}, False, False),
        (AsNumbers, {}, True, True),
        (ScheduleFree, {}, True, True),
        (Adam, {"lr": 0.0}, True, True),
        (torch.optim.Adafactor, {}, False, True),
    ],
)
def test_a_trial_tells_what_ranks_can_update_separately(
    kind: Any, settings: dict[str, Any], by_element: bool, by_tensor: bool
) -> None:
    cpu = torch.device("cpu")
    found = [not find_difference(partial(kind, **settings), [{}], by, cpu) for by in ("element", "tensor")]
    assert found == [by_element, by_tensor]


def test_what_is_tried_has_as_many_dimensions_as_the_parameters() -> None:
    assert 'by="tensor"' in refused(lambda: ShardedOptimizer(nn.Conv2d(2, 2, 2), Centering))
    assert "use the optimizer itself" in refused(lambda: ShardedOptimizer(nn.Linear(4, 4), ByVectors, by="tensor"))
    ShardedOptimizer(nn.Linear(4, 4), Centering)
    ShardedOptimizer(nn.Linear(4, 4, bias=False), ByVectors, by="tensor")


def test_an_optimizer_that_lets_another_step_is_refused() -> None:
    # The other one would step over whole parameters, on every rank.
    assert "the step changed nothing" in refused(lambda: ShardedOptimizer.of(Holding(nn.Linear(4, 4).parameters())))


def test_marks_of_parameters_reach_the_optimizer() -> None:
    net = nn.Linear(4, 4)
    net.weight.factor = 0.0  # type: ignore[assignment]
    before = net.weight.clone(), net.bias.clone()
    optimizer = ShardedOptimizer(net, Marked)
    net(torch.ones(4)).sum().backward()
    optimizer.step()
    assert torch.equal(net.weight, before[0])
    assert not torch.equal(net.bias, before[1])


def refused(make: Any) -> str:
    with pytest.raises(UsageError) as caught:
        make()
    return str(caught.value)


def test_settings_count_wherever_they_are_given() -> None:
    net = nn.Linear(4, 4)
    clipped = [{"params": [net.weight]}, {"params": [net.bias], "max_grad_norm": 0.1}]
    remedy = "use the optimizer itself"
    for make in (
        lambda: ShardedOptimizer(net, Clipping, max_grad_norm=0.1),
        lambda: ShardedOptimizer(clipped, Clipping, by="tensor"),
        lambda: ShardedOptimizer.of(Clipping(net.parameters(), max_grad_norm=0.1)),
        lambda: ShardedOptimizer([net.weight], Clipping).add_param_group(dict(clipped[1])),
    ):
        assert remedy in refused(make)
    assert refused(lambda: ShardedOptimizer(net, Failing)) == (
        "Failing could not be tried on small tensors: it raised LookupError: give a closure; use the optimizer itself"
    )
    assert 'by="tensor"' in refused(lambda: ShardedOptimizer(nn.Linear(4, 4, bias=False), torch.optim.Muon))
    ShardedOptimizer(net, Clipping)


def with_two_views(world: World) -> bool:
    """Train with a schedule-free optimizer, and look at both views of the weights."""
    results = []
    for sharded in (False, True):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(8, 40), nn.Tanh(), nn.Linear(40, 4))
        model = paceline.DistributedDataParallel(net)
        optimizer: Any = ShardedOptimizer(model, ScheduleFree) if sharded else ScheduleFree(net.parameters())
        seen = []
        for step in range(4):
            optimizer.train()
            model(torch.full((2, 8), 1.0 + step + world.rank)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if step == 2 and sharded:
                optimizer.load_state_dict(optimizer.full_state_dict())
            optimizer.eval()
            seen += [each.detach().clone() for each in net.parameters()]
        results.append(seen)
    assert not hasattr(ShardedOptimizer(nn.Linear(2, 2), SGD), "train")
    return all(map(torch.equal, *results))


def test_both_views_of_a_schedule_free_optimizer_have_the_bits_of_the_unsharded_one(pools: Pools) -> None:
    assert all(pools.run(2, with_two_views))
