"""Losses of derivatives are averaged even if their backward reaches no output of the wrapper.

``autograd.grad(model(x).sum(), x, create_graph=True)`` goes through the output, but the backward of a loss on its
result may not: the WGAN-GP penalty, R1, physical residuals, forces. These gradients used to stay local, and the
optimizer's guard missed them if they were added to an existing average.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.nn.functional import all_reduce

from paceline.core.world import World
from paceline.ddp import DistributedDataParallel
from twins import Pools, same_gradients, same_weights

Models = tuple[nn.Module, nn.Module]


def build(activation: type[nn.Module]) -> nn.ModuleList:
    """Build two nets with a shared body. Derivatives of a ReLU net do not depend on its biases."""
    torch.manual_seed(0)
    body = nn.Sequential(nn.Linear(6, 8), activation(), nn.Linear(8, 4), activation())
    return nn.ModuleList(nn.Sequential(body, nn.Linear(4, 1)) for _ in range(2)).double()


def slope(model: nn.Module, x: Tensor) -> Tensor:
    """Return a penalty on the model's derivatives; the output is freed on return."""
    x = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    return (gradient.square().sum(1) - 1).square().mean()


def penalty_alone(models: Models, x: Tensor) -> None:
    slope(models[0], x).backward()


def penalty_after_plain_losses(models: Models, x: Tensor) -> None:
    models[0](x).mean().backward()
    (-models[0](x + 1).mean()).backward()
    slope(models[0], x).backward()


def penalty_taken_before_a_plain_loss(models: Models, x: Tensor) -> None:
    penalty = slope(models[0], x)
    models[0](x).square().mean().backward()
    penalty.backward()


def residual_beside_data(models: Models, x: Tensor) -> None:
    x = x.clone().requires_grad_()
    out = models[0](x)
    (gradient,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    (out - 1).square().mean().backward(retain_graph=True)
    gradient.square().mean().backward()


def accumulated(models: Models, x: Tensor) -> None:
    model = models[0]
    with model.no_sync() if isinstance(model, DistributedDataParallel) else nullcontext():
        slope(model, x).backward()
    slope(model, x + 1).backward()


def two_models_with_a_shared_body(models: Models, x: Tensor) -> None:
    (slope(models[0], x) + slope(models[1], x + 1)).backward()


def one_of_two_with_a_shared_body(models: Models, x: Tensor) -> None:
    slope(models[0], x).backward()
    slope(models[1], x).backward()


def penalty_on_gradients(models: Models, x: Tensor) -> None:
    """Penalize the gradients of the whole batch, averaged by a differentiable collective."""
    model = models[0]
    loss = model(x).square().mean()
    gradients = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    if isinstance(model, DistributedDataParallel):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            gradients = tuple(all_reduce(gradient.contiguous()) / dist.get_world_size() for gradient in gradients)
    (loss + sum(gradient.square().sum() for gradient in gradients)).backward()


LOSSES = [
    penalty_on_gradients, penalty_alone, penalty_after_plain_losses, penalty_taken_before_a_plain_loss,
    residual_beside_data, accumulated, two_models_with_a_shared_body, one_of_two_with_a_shared_body,
]  # fmt: skip


def compare_with_twin(world: World, loss: Callable[[Models, Tensor], None]) -> None:
    bare = build(nn.ReLU if loss in (penalty_alone, one_of_two_with_a_shared_body) else nn.Tanh)
    twin = copy.deepcopy(bare)
    models = tuple(DistributedDataParallel(module, unused_parameters="allow") for module in bare)
    optimizers = [torch.optim.SGD(module.parameters(), 0.05, momentum=0.9) for module in (bare, twin)]
    for step in range(4):
        batch = torch.randn(4 * world.size, 6, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss(models, batch[world.rank :: world.size])
        loss((twin[0], twin[1]), batch)
        same_gradients(bare, twin, where=f"{loss.__name__}, step {step}:")
        for optimizer in optimizers:
            optimizer.step()
        same_weights(bare, twin, where=f"{loss.__name__}, step {step}:")


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.__name__)
def test_losses_of_derivatives_equal_one_process(pools: Pools, loss: Callable[[Models, Tensor], None]) -> None:
    pools.run(2, compare_with_twin, loss)


def wrap_again(world: World) -> None:
    model = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    old = DistributedDataParallel(model)
    old(torch.ones(2, 6, dtype=torch.float64)).sum().backward()
    model.zero_grad()
    twin, new = copy.deepcopy(model), DistributedDataParallel(model, unused_parameters="allow")
    batch = torch.randn(8, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    slope(new, batch[world.rank :: world.size]).backward()
    slope(twin, batch).backward()
    same_gradients(model, twin)


def test_derivatives_are_averaged_while_an_older_wrapper_is_alive(pools: Pools) -> None:
    # The wrappers share all parameters, and no output shows which wrapper's backward runs.
    pools.run(2, wrap_again)


def create_graph_warnings(world: World) -> list[list[str]]:
    """Return the warnings of three backwards with ``create_graph=True``; only the first, local one keeps a graph."""
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(6, 1).double())
    warned = []
    for step in range(3):
        with warnings.catch_warnings(record=True) as caught, model.no_sync() if step == 0 else nullcontext():
            warnings.simplefilter("always")
            model(torch.ones(2, 6, dtype=torch.float64) * (world.rank + 1)).square().sum().backward(create_graph=True)
        warned.append([f"{Path(w.filename).name}: {w.message}" for w in caught if "p.grad" in str(w.message)])
        assert all(parameter.grad.requires_grad == (step == 0) for parameter in model.parameters())
        model.zero_grad()
    return warned


def test_create_graph_warns_that_averages_are_not_differentiable(pools: Pools) -> None:
    # As in torch DDP, p.grad is a constant; a penalty on it failed with torch's "does not require grad".
    first, second = pools.run(2, create_graph_warnings)
    assert [len(warned) for warned in first] == [0, 1, 0]
    assert first[1][0].startswith("test_ddp_derivatives.py: after backward(create_graph=True) p.grad is the average")
    assert "torch.autograd.grad(loss, parameters, create_graph=True)" in first[1][0]
    assert second == [[], [], []]
