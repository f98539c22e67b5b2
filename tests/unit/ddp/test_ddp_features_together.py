"""Combinations of two features of the wrapper."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from insides import step_in_backward
from models import chain
from paceline.core.world import World
from paceline.ddp import DistributedDataParallel
from paceline.errors import UsageError
from twins import Pools


def net() -> nn.Module:
    return chain(4, 6, 3)


def batch(world: World, step: int = 0) -> Tensor:
    return torch.randn(5, 4, generator=torch.Generator().manual_seed(10 * step + world.rank))


def train_unevenly(model: DistributedDataParallel, world: World) -> None:
    """Take one more step on rank 1 than on rank 0, inside ``join``."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with model.join():
        for step in range(1 + world.rank):
            optimizer.zero_grad()
            model(batch(world, step)).square().mean().backward()
            optimizer.step()


def sharded_in_join(world: World) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("data", "model"))
    module = net()
    parallelize_module(module, mesh["model"], {"0": ColwiseParallel()})
    model = DistributedDataParallel(module, device_mesh=mesh["data"])
    train_unevenly(model, world)
    weight: Any = module[0].weight
    values = [torch.empty_like(weight.to_local()) for _ in range(2)]
    dist.all_gather(values, weight.to_local().detach())
    assert torch.equal(*values)


def test_sharded_parameters_are_equal_after_join(pools: Pools) -> None:
    pools.run(2, sharded_in_join)


class Lookup(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 3, sparse=True)
        self.head = nn.Linear(3, 2)

    def forward(self, rows: Tensor) -> Tensor:
        return self.head(self.table(rows))


def check_nothing_is_retained(world: World) -> None:
    made: list[Any] = []

    def hook(_: object, bucket: Any) -> Any:
        mean = bucket.buffer().clone()
        dist.all_reduce(mean)
        made.append(weakref.ref(mean))
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        future.set_result(mean.div_(world.size))
        return future

    model = DistributedDataParallel(Lookup())
    model.register_comm_hook(None, hook)
    for _ in range(2):
        model.zero_grad()
        model(torch.tensor([1, 2])).square().sum().backward()
    sparse = weakref.ref(model.module.table.weight.grad)
    model.zero_grad()
    gc.collect()
    assert sparse() is None
    assert all(reference() is None for reference in made)


def test_sparse_gradients_and_hook_results_are_freed_between_steps(pools: Pools) -> None:
    pools.run(2, check_nothing_is_retained)


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        # Backward starts with the later one: a small gradient is launched, and a large one arrives late.
        large = checkpoint(self.layer, x.requires_grad_(), use_reentrant=True)
        return large + checkpoint(self.layer, 0.01 * x, use_reentrant=True)


def large_and_late(_: World) -> float:
    model = DistributedDataParallel(Twice(), reduce_dtype=torch.float16)
    model(torch.full((1, 1), 40000.0)).sum().backward()
    model.zero_grad()
    model(torch.full((1, 1), 40000.0)).sum().backward()
    return float(model.module.layer.weight.grad)


def test_late_gradients_in_half_precision_do_not_overflow_in_the_sum(pools: Pools) -> None:
    assert pools.run(2, large_and_late) == pytest.approx([40400.0] * 2, rel=1e-3)


def wrap_with_optimizer_in_backward(world: World) -> None:
    with pytest.raises(UsageError, match="_register_fused_optim drives torch's own reducer"):
        DistributedDataParallel(nn.Linear(2, 2))._register_fused_optim(torch.optim.SGD, lr=0.1)
    net = nn.Linear(2, 2)
    step_in_backward(torch.optim.SGD, net.parameters(), 0.1)
    with pytest.raises(UsageError, match="'weight' has an optimizer that steps in backward"):
        DistributedDataParallel(net)


def test_optimizers_stepping_in_backward_are_refused(pools: Pools) -> None:
    pools.run(2, wrap_with_optimizer_in_backward)
