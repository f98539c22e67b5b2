"""torch's own engines on our process group train as they do on Gloo."""

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

from paceline.comm.process_group import PacelineProcessGroup
from paceline.core.world import World
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
    """A few steps on this replica's batches."""
    # Not Adam, which makes whole steps of gradients that are nothing but the last bits of a sum.
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    for step in range(STEPS):
        optimizer.zero_grad()
        module(batch(step, place)).square().mean().backward()
        optimizer.step()


def flat(module: nn.Module) -> Tensor:
    """All parameters, whole."""
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
    return flat(module)


def hybrid_fsdp2(world: World) -> Tensor:
    """Sharded over one dimension of a mesh, replicated over the other."""
    from torch.distributed.fsdp import fully_shard

    module = model()
    mesh = init_device_mesh("cpu", (world.size // 2, 2), mesh_dim_names=("replicate", "shard"))
    fully_shard(module, mesh=mesh)
    train(module, world.rank)
    return flat(module)


def tensor_parallel(world: World) -> Tensor:
    """DTensor: each block's first matrix by columns, its second by rows; all ranks see the same batch."""
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
    return flat(module)


def redistributed(world: World) -> Tensor:
    """DTensors between layouts: all-gather, reduce-scatter, all-to-all."""
    mesh = init_device_mesh("cpu", (world.size,))
    whole = torch.arange(120.0).view(12, 10)
    rows = distribute_tensor(whole, mesh, [Shard(0)])
    columns = rows.redistribute(mesh, [Shard(1)])
    assert torch.equal(columns.full_tensor(), whole)
    product = rows.t() @ distribute_tensor(whole, mesh, [Shard(0)])  # partial sums
    return product.redistribute(mesh, [Replicate()]).to_local()


def zero_optimizer(world: World) -> Tensor:
    """torch's ZeroRedundancyOptimizer beside torch's DDP."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    module = nn.parallel.DistributedDataParallel(model())
    optimizer = ZeroRedundancyOptimizer(module.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)
    for step in range(STEPS):
        optimizer.zero_grad()
        module(batch(step, world.rank)).square().mean().backward()
        optimizer.step()
    return flat(module)


def on(world: World, engine: Callable[[World], Tensor]) -> tuple[bool, Tensor]:
    # torch's engines use names of its own that it deprecates, and functions that it calls unsupported.
    warnings.simplefilter("ignore", FutureWarning)
    warnings.simplefilter("ignore", DeprecationWarning)
    result = engine(world)
    return isinstance(dist.group.WORLD, PacelineProcessGroup), result


@pytest.fixture(scope="module")
def worlds() -> Iterator[tuple[Pools, Pools]]:
    """Ranks of our backend, and of Gloo."""
    with Pools("paceline") as ours, Pools("gloo") as gloos:
        yield ours, gloos


@pytest.mark.parametrize("engine", [fsdp2, hybrid_fsdp2, tensor_parallel, redistributed, zero_optimizer])
def test_results_equal_gloos(worlds: tuple[Pools, Pools], engine: Callable[[World], Tensor]) -> None:
    ours, gloos = (pools.run(4, on, engine) for pools in worlds)
    assert all(is_ours for is_ours, _ in ours)
    assert not any(is_ours for is_ours, _ in gloos)
    for (_, mine), (_, theirs) in zip(ours, gloos, strict=True):
        assert torch.equal(mine, ours[0][1])  # the same on every rank, to the bit
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)
