"""Local SGD: optimizers step on local gradients inside ``local_steps`` and nowhere else, and equal torch DDP's."""

from __future__ import annotations

import os
import warnings
from collections import OrderedDict
from collections.abc import Callable
from contextlib import nullcontext, suppress
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.algorithms.model_averaging.hierarchical_model_averager import HierarchicalModelAverager

from insides import TEST_HOST_CHANNEL
from models import chain
from paceline import World
from paceline.ddp import DistributedDataParallel, accumulate
from paceline.errors import ReplicaMismatch, UsageError
from ranks import Ranks
from twins import Pools, same_tensor


def net() -> nn.Module:
    return chain(4, 6, 2, dtype=torch.float64)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def loss_of(model: nn.Module, rank: int, step: int) -> Any:
    x = torch.randn(5, 4, generator=torch.Generator().manual_seed(100 * step + rank), dtype=torch.float64)
    return model(x).square().mean()


def step(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, number: int) -> None:
    optimizer.zero_grad()
    loss_of(model, rank, number).backward()
    optimizer.step()


def weights(model: nn.Module) -> Tensor:
    return nn.utils.parameters_to_vector(model.parameters()).detach().clone()


# -- torch's own loops -------------------------------------------------------------------------------------------------


def periodic(size: int) -> Any:
    return PeriodicModelAverager(period=3, warmup_steps=3)


def hierarchical(size: int) -> Any:
    return HierarchicalModelAverager(OrderedDict([(2, 1 if size % 2 else 2), (3, size)]), warmup_steps=3)


def post_local_sgd(model: nn.Module, averager: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the import loads TorchScript
        from torch.distributed.optim import PostLocalSGDOptimizer
    return PostLocalSGDOptimizer(sgd(model), averager)


def local_averages(world: World, wrap: Any, make: Callable[[int], Any], in_optimizer: bool) -> Tensor:
    """Take local steps with a model averager, between two synchronized steps; return the weights after each step."""
    model, averager, seen = wrap(net()), make(world.size), []
    optimizer = post_local_sgd(model, averager) if in_optimizer else sgd(model)
    for number in range(13):
        is_local = 1 <= number < 11  # the averager's last step is an average
        block = getattr(model, "local_steps", model.no_sync) if is_local else nullcontext
        with block():
            step(model, optimizer, world.rank, number)
            if is_local and not in_optimizer:
                averager.average_parameters(model.parameters())
        seen.append(weights(model))
    return torch.stack(seen)


def post_local_hook(world: World, wrap: Any, make: Callable[[int], Any]) -> Tensor:
    """Train with torch's recipe: gradients are averaged over pairs of ranks from the 4th step on."""
    model, (pair, _) = wrap(net()), dist.new_subgroups(group_size=2)
    state = post_localSGD_hook.PostLocalSGDState(None, pair, start_localSGD_iter=3)
    model.register_comm_hook(state, post_localSGD_hook.post_localSGD_hook)
    optimizer, seen = post_local_sgd(model, make(world.size)), []
    for number in range(10):
        step(model, optimizer, world.rank, number)
        seen.append(weights(model))
    return torch.stack(seen)


def beside_torch(world: World, train: Any, *args: Any) -> Tensor:
    ours = train(world, DistributedDataParallel, *args)
    theirs = train(world, nn.parallel.DistributedDataParallel, *args)
    same_tensor(ours, theirs, 0 if world.size == 2 else 1e-12, f"rank {world.rank}")
    return ours


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(("make", "in_optimizer"), [(periodic, False), (hierarchical, False), (periodic, True)])
def test_local_steps_with_an_averager_equal_torch_ddp(pools: Pools, size: int, make: Any, in_optimizer: bool) -> None:
    first, *others = pools.run(size, beside_torch, local_averages, make, in_optimizer)
    for other in others:
        assert torch.equal(other[-1], first[-1])
        assert not torch.equal(other[1], first[1])


@pytest.mark.parametrize("make", [periodic, hierarchical])
def test_post_local_sgd_hook_in_two_subgroups_equals_torch_ddp(pools: Pools, make: Any) -> None:
    first, pair, *others = pools.run(4, beside_torch, post_local_hook, make)
    assert torch.equal(first, pair)
    for other in others:
        assert torch.equal(other[-1], first[-1])
        assert not torch.equal(other[-2], first[-2])


# -- one optimizer beside an unwrapped model ---------------------------------------------------------------------------


def lbfgs(world: World, model: nn.Module) -> None:
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4)
    for number in range(3):

        def closure(number: int = number) -> Any:
            optimizer.zero_grad()
            (loss := loss_of(model, world.rank, number)).backward()
            return loss

        optimizer.step(closure)


def scaled(world: World, model: nn.Module) -> None:
    optimizer, scaler = sgd(model), torch.amp.GradScaler("cpu", init_scale=4.0)
    for number in range(6):
        factor = float("inf") if number == 2 else 1.0  # a skipped step
        scaler.scale(loss_of(model, world.rank, number) * factor).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=number % 2 == 0)


def micro_batches(world: World, model: nn.Module) -> None:
    optimizer = sgd(model)
    for number in range(6):
        loss_of(model, world.rank, number).backward()
        if number % 2:
            assert getattr(model, "holds_local_gradients", lambda: True)()
            optimizer.step()
            assert not getattr(model, "holds_local_gradients", bool)()
            optimizer.zero_grad()


def beside_unwrapped(world: World, train: Any) -> None:
    model, twin = DistributedDataParallel(net()), net()
    with model.local_steps():
        train(world, model)
    train(world, twin)
    assert torch.equal(weights(model), weights(twin))


@pytest.mark.parametrize("train", [lbfgs, scaled, micro_batches])
def test_local_steps_equal_an_unwrapped_model(ranks: Ranks, train: Any) -> None:
    ranks.run(beside_unwrapped, train)


# -- after the block, and calls that the block refuses -----------------------------------------------------------------


def drift_apart(world: World, options: dict[str, Any], late: str) -> tuple[int, str]:
    """Take local steps between comparisons; return the number of the step that is refused, and its error."""
    with patch.dict(os.environ, {TEST_HOST_CHANNEL: late} if late else {}):
        model = DistributedDataParallel(net(), **options)
    optimizer = sgd(model)
    for number in range(12):
        try:
            with model.local_steps() if number == 4 else nullcontext():
                step(model, optimizer, world.rank if number == 4 else 0, number)
        except ReplicaMismatch as error:
            return number, str(error)
    return 12, ""


@pytest.mark.parametrize("late", ["", "1"])
@pytest.mark.parametrize("options", [{}, {"check_replicas_every": 100}])
def test_replicas_are_compared_after_local_steps(pools: Pools, options: dict[str, Any], late: str) -> None:
    for number, message in pools.run(2, drift_apart, options, late):
        assert number == 5
        assert "parameter '0.bias' (and 3 more) has different bits on rank 1" in message
        assert "local_steps() whose parameters were not averaged" in message


def misuse(world: World) -> None:
    model = DistributedDataParallel(net())
    optimizer = sgd(model)
    with suppress(KeyError), model.local_steps():
        with model.local_steps(), model.no_sync():
            step(model, optimizer, 0, 0)
        step(model, optimizer, 0, 1)
        for call in (model.sync_gradients, lambda: next(accumulate(model, [1], every=1))):
            with pytest.raises(UsageError, match=r"inside model\.local_steps\(\) would average gradients"):
                call()
        with model.weight(10):
            (loss_of(model, 0, 2) * 10).backward()
        with pytest.raises(UsageError, match=r"leave model\.weight\(\) out"):
            optimizer.step()
        raise KeyError
    assert model.do_sync
    with pytest.raises(UsageError, match=r"in local_steps\(\).* inside model\.local_steps\(\) too"):
        optimizer.step()
    step(model, optimizer, 0, 3)
    sliced = DistributedDataParallel(net(), virtual_ranks=2)
    with pytest.raises(UsageError, match="virtual_ranks=2, which promises"), sliced.local_steps():
        pass


def test_the_block_ends_with_its_gradients_and_refuses_synchronization(ranks: Ranks) -> None:
    ranks.run(misuse)
