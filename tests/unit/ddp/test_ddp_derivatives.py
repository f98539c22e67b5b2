"""Losses made of derivatives are averaged, also where their backward reaches no output of the wrapper.

``autograd.grad(model(x).sum(), x, create_graph=True)`` runs through the output, but the backward of a loss on the
result need not: WGAN-GP's penalty, R1, physical residuals, forces. Such gradients stayed local, and where they were
added to an average that was there already, the optimizer's guard could not see it.
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
    """Two nets with a common body. Derivatives of a ReLU net have no biases in them."""
    torch.manual_seed(0)
    body = nn.Sequential(nn.Linear(6, 8), activation(), nn.Linear(8, 4), activation())
    return nn.ModuleList(nn.Sequential(body, nn.Linear(4, 1)) for _ in range(2)).double()


def slope(model: nn.Module, x: Tensor) -> Tensor:
    """A penalty on the model's derivatives; its output is gone when this returns."""
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


def two_with_a_common_body(models: Models, x: Tensor) -> None:
    (slope(models[0], x) + slope(models[1], x + 1)).backward()


def one_of_two_with_a_common_body(models: Models, x: Tensor) -> None:
    slope(models[0], x).backward()
    slope(models[1], x).backward()


def penalty_on_gradients(models: Models, x: Tensor) -> None:
    """On those of the whole batch, which are averaged by a collective that autograd knows."""
    model = models[0]
    loss = model(x).square().mean()
    gradients = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    if isinstance(model, DistributedDataParallel):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            gradients = tuple(all_reduce(gradient.contiguous()) / dist.get_world_size() for gradient in gradients)
    (loss + sum(gradient.square().sum() for gradient in gradients)).backward()


LOSSES = [
    penalty_on_gradients,
    penalty_alone,
    penalty_after_plain_losses,
    penalty_taken_before_a_plain_loss,
    residual_beside_data,
    accumulated,
    two_with_a_common_body,
    one_of_two_with_a_common_body,
]


def beside_one_process(world: World, loss: Callable[[Models, Tensor], None]) -> None:
    bare = build(nn.ReLU if loss in (penalty_alone, one_of_two_with_a_common_body) else nn.Tanh)
    twin = copy.deepcopy(bare)
    models = tuple(DistributedDataParallel(one, unused_parameters="allow") for one in bare)
    optimizers = [torch.optim.SGD(one.parameters(), 0.05, momentum=0.9) for one in (bare, twin)]
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
    pools.run(2, beside_one_process, loss)


def rewrapped(world: World) -> None:
    model = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    old = DistributedDataParallel(model)
    old(torch.ones(2, 6, dtype=torch.float64)).sum().backward()
    model.zero_grad()
    twin, new = copy.deepcopy(model), DistributedDataParallel(model, unused_parameters="allow")
    batch = torch.randn(8, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    slope(new, batch[world.rank :: world.size]).backward()
    slope(twin, batch).backward()
    same_gradients(model, twin)


def test_a_wrapper_averages_derivatives_while_an_older_one_lives(pools: Pools) -> None:
    # All parameters are common to both, and neither one's output tells whose backward it is.
    pools.run(2, rewrapped)


def said_of_graphs(world: World) -> list[list[str]]:
    """Warnings of three backwards that make a graph; the first is local, where ``p.grad`` has one."""
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(6, 1).double())
    said = []
    for step in range(3):
        with warnings.catch_warnings(record=True) as caught, model.no_sync() if step == 0 else nullcontext():
            warnings.simplefilter("always")
            model(torch.ones(2, 6, dtype=torch.float64) * (world.rank + 1)).square().sum().backward(create_graph=True)
        said.append([f"{Path(each.filename).name}: {each.message}" for each in caught if "p.grad" in str(each.message)])
        assert all(parameter.grad.requires_grad == (step == 0) for parameter in model.parameters())
        model.zero_grad()
    return said


def test_a_graph_of_averages_is_not_promised_in_silence(pools: Pools) -> None:
    # As in torch DDP, p.grad is a constant; a penalty on it ended in torch's «does not require grad».
    first, second = pools.run(2, said_of_graphs)
    assert [len(said) for said in first] == [0, 1, 0]
    assert first[1][0].startswith("test_ddp_derivatives.py: after backward(create_graph=True) p.grad is the average")
    assert "torch.autograd.grad(loss, parameters, create_graph=True)" in first[1][0]
    assert second == [[], [], []]
