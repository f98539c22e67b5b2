"""Torch's engines train on Paceline's process group as on Gloo."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from insides import PacelineProcessGroup
from paceline import World
from ranks import Pools

pytestmark = pytest.mark.slow

STEPS = 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(16, 52)
        self.down = nn.Linear(52, 16)

    def forward(self, values: Tensor) -> Tensor:
        result: Tensor = values + self.down(torch.relu(self.up(values)))
        return result


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block(), nn.Linear(16, 3))


def batch(step: int, rank: int) -> Tensor:
    return torch.randn(5, 16, generator=torch.Generator().manual_seed(100 * step + rank))


def train(module: nn.Module, place: int) -> None:
    """Train a few steps on this replica's batches."""
    # Not Adam, which turns rounding errors of zero gradients into full steps.
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    for step in range(STEPS):
        optimizer.zero_grad()
        module(batch(step, place)).square().mean().backward()
        optimizer.step()


def flat_parameters(module: nn.Module) -> Tensor:
    """Return all parameters, unsharded, in one vector."""
    parts = [part.full_tensor() if isinstance(part, DTensor) else part for part in module.parameters()]
    return torch.cat([part.detach().flatten() for part in parts])


def fsdp2(world: World) -> Tensor:
    from torch.distributed.fsdp import fully_shard

    module = model()
    mesh = init_device_mesh("cpu", (world.size,))
    for part in module:
        fully_shard(part, mesh=mesh)
    fully_shard(module, mesh=mesh)
    train(module, world.rank)
    return flat_parameters(module)


def hybrid_fsdp2(world: World) -> Tensor:
    """Shard over one mesh dimension and replicate over the other."""
    from torch.distributed.fsdp import fully_shard

    module = model()
    mesh = init_device_mesh("cpu", (world.size // 2, 2), mesh_dim_names=("replicate", "shard"))
    fully_shard(module, mesh=mesh)
    train(module, world.rank)
    return flat_parameters(module)


def tensor_parallel(world: World) -> Tensor:
    """Split each block's first matrix by columns and its second by rows; all ranks get the same batch."""
    module = model()
    mesh = init_device_mesh("cpu", (world.size,))
    plan = {
        "0.up": ColwiseParallel(),
        "0.down": RowwiseParallel(),
        "1.up": ColwiseParallel(),
        "1.down": RowwiseParallel(),
    }
    parallelize_module(module, mesh, plan)
    train(module, 0)
    return flat_parameters(module)


def redistribute(world: World) -> Tensor:
    """Redistribute DTensors: all-gather, reduce-scatter, all-to-all."""
    mesh = init_device_mesh("cpu", (world.size,))
    whole = torch.arange(120.0).view(12, 10)
    rows = distribute_tensor(whole, mesh, [Shard(0)])
    columns = rows.redistribute(mesh, [Shard(1)])
    assert torch.equal(columns.full_tensor(), whole)
    product = rows.t() @ distribute_tensor(whole, mesh, [Shard(0)])  # partial sums
    return product.redistribute(mesh, [Replicate()]).to_local()


def zero_optimizer(world: World) -> Tensor:
    """Use torch's ZeroRedundancyOptimizer with torch DDP."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    module = nn.parallel.DistributedDataParallel(model())
    optimizer = ZeroRedundancyOptimizer(module.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)
    for step in range(STEPS):
        optimizer.zero_grad()
        module(batch(step, world.rank)).square().mean().backward()
        optimizer.step()
    return flat_parameters(module)


def run_engine(world: World, engine: Callable[[World], Tensor]) -> tuple[bool, Tensor]:
    # Torch's engines use deprecated and unsupported torch functions.
    warnings.simplefilter("ignore", FutureWarning)
    warnings.simplefilter("ignore", DeprecationWarning)
    result = engine(world)
    return isinstance(dist.group.WORLD, PacelineProcessGroup), result


@pytest.fixture(scope="module")
def worlds() -> Iterator[tuple[Pools, Pools]]:
    """Ranks on Paceline's backend and on Gloo."""
    with Pools("paceline") as ours, Pools("gloo") as gloo:
        yield ours, gloo


@pytest.mark.parametrize("engine", [fsdp2, hybrid_fsdp2, tensor_parallel, redistribute, zero_optimizer])
def test_results_equal_gloo(worlds: tuple[Pools, Pools], engine: Callable[[World], Tensor]) -> None:
    ours, gloo = (pools.run(4, run_engine, engine) for pools in worlds)
    assert all(is_ours for is_ours, _ in ours)
    assert not any(is_ours for is_ours, _ in gloo)
    for (_, mine), (_, theirs) in zip(ours, gloo, strict=True):
        assert torch.equal(mine, ours[0][1])  # the same bits on every rank
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)
