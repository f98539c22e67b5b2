"""Promise: data parallelism over one mesh dimension and tensor parallelism over the other equal one process."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from paceline import World
from paceline.compression import Int8
from paceline.ddp import DistributedDataParallel, accumulate
from paceline.errors import NonFiniteGradient, ReplicaMismatch, UsageError
from twins import Pools, make_optimizer, same_tensor, summed_loss

BATCHES = (7, 4, 5, 6, 8)


class Block(nn.Module):
    """A norm, a feed-forward part, an optional branch, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4, dtype=torch.float64)
        self.up = nn.Linear(4, 8, dtype=torch.float64)
        self.down = nn.Linear(8, 4, dtype=torch.float64)
        self.branch = nn.Linear(4, 8, dtype=torch.float64)
        self.head = nn.Linear(4, 3, dtype=torch.float64)

    def forward(self, x: Tensor, with_branch: bool) -> Tensor:
        hidden = self.down(self.up(self.norm(x)).tanh())
        if with_branch:
            hidden = hidden + self.branch(x).sum(-1, keepdim=True)
        return self.head(hidden)


def by_columns_and_rows(module: nn.Module, mesh: DeviceMesh) -> None:
    plan: dict[str, Any] = {
        "up": ColwiseParallel(),
        "down": RowwiseParallel(),
        "branch": ColwiseParallel(output_layouts=Replicate()),
    }
    parallelize_module(module, mesh, plan)


def by_sequence(module: nn.Module, mesh: DeviceMesh) -> None:
    """Each rank normalizes a part of the sequence, so the gradient of the norm is a partial sum."""
    by_columns_and_rows(module, mesh)
    shards = {"input_layouts": Shard(1), "desired_input_layouts": Replicate()}
    norm = module.get_submodule("norm")  # its input is this rank's part of the sequence
    norm.register_forward_pre_hook(lambda _, given: (given[0].chunk(mesh.size(), 1)[mesh.get_local_rank()],))
    parallelize_module(module, mesh, {"norm": SequenceParallel(), "up": PrepareModuleInput(**shards)})


def batch_of(step: int, count: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(count, 8, 4, generator=generator, dtype=torch.float64)
    return x, torch.randn(count, 8, 3, generator=generator, dtype=torch.float64)


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def assert_same(ours: nn.Module, twin: nn.Module, where: str) -> None:
    for (name, mine), other in zip(ours.named_parameters(), twin.parameters(), strict=True):
        assert (mine.grad is None) == (other.grad is None), f"{where} {name}"
        if mine.grad is not None and other.grad is not None:
            assert isinstance(mine.grad, DTensor) == isinstance(mine, DTensor), f"{where} {name}"
            same_tensor(whole(mine.grad), other.grad, 1e-9, f"{where} gradient of {name}")
        same_tensor(whole(mine.detach()), other.detach(), 1e-9, f"{where} {name}")


def train(
    world: World, plan: Callable[[nn.Module, DeviceMesh], None], shape: tuple[int, int], micros: int, **options: Any
) -> None:
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("data", "tensor"))
    torch.manual_seed(0)
    twin = Block()
    module = copy.deepcopy(twin)
    data = mesh["data"]
    if data.get_local_rank() == 1:
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.fill_(0.5)  # replaced by rank 0's shards
    plan(module, mesh["tensor"])
    model = DistributedDataParallel(module, device_mesh=data, bucket_cap_mb=1e-4, unused_parameters="allow", **options)
    optimizers = [make_optimizer("sgd", net) for net in (module, twin)]
    for step, count in enumerate(BATCHES):
        x, y = batch_of(step, count)
        pieces = [
            (xs.tensor_split(shape[0]), ys.tensor_split(shape[0]), step != 3 and at == 0)
            for at, (xs, ys) in enumerate(zip(x.tensor_split(micros), y.tensor_split(micros), strict=True))
        ]
        for micro in accumulate(model, pieces, every=micros):
            xs, ys, with_branch = micro[0][data.get_local_rank()], micro[1][data.get_local_rank()], micro[2]
            with model.weight(len(xs)):
                summed_loss(model(xs, with_branch and data.get_local_rank() == 0), ys).backward()
        losses = [
            summed_loss(twin(xs, with_branch and rank == 0), ys)
            for all_xs, all_ys, with_branch in pieces
            for rank, (xs, ys) in enumerate(zip(all_xs, all_ys, strict=True))
        ]
        (torch.stack(losses).sum() / count).backward()
        where = f"rank {world.rank}, step {step}:"
        assert_same(module, twin, where)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        assert_same(module, twin, where)


@pytest.mark.parametrize("plan", [by_columns_and_rows, by_sequence])
def test_shards_are_averaged(pools: Pools, plan: Any) -> None:
    pools.run(4, train, plan, (2, 2), 2)


def wrapped(shape: tuple[int, int] = (2, 2), **options: Any) -> tuple[Any, DistributedDataParallel]:
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("data", "tensor"))
    torch.manual_seed(0)
    module = Block()
    by_columns_and_rows(module, mesh["tensor"])
    return module, DistributedDataParallel(module, device_mesh=mesh["data"], **options)


def train_checked(world: World) -> None:
    module, model = wrapped(init_sync="verify", check_finite=True, check_replicas_every=1)
    x, y = batch_of(0, 2)
    summed_loss(model(x, True), y).backward()
    if world.rank == 0:
        module.up.weight.to_local().data[0, 0] = float("nan")
    with pytest.raises(NonFiniteGradient, match=r"'up\.weight'"):
        summed_loss(model(x, True), y).backward()


def test_checks_cover_shards(pools: Pools) -> None:
    pools.run(4, train_checked)


def wrap_differing_shards(world: World) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    weight = distribute_tensor(torch.zeros(4, 4), mesh["tensor"], [Shard(0)])
    module = nn.Module()
    module.weight = nn.Parameter(weight)
    if world.rank == 3:  # the second shard of the second replica
        module.weight.to_local().data[0, 0] = 1.0
    if world.rank % 2:
        with pytest.raises(ReplicaMismatch, match=r"'weight' has different values on rank 1"):
            DistributedDataParallel(module, device_mesh=mesh["data"], init_sync="verify")
    else:
        DistributedDataParallel(module, device_mesh=mesh["data"], init_sync="verify")


def test_differing_shard_is_named(pools: Pools) -> None:
    pools.run(4, wrap_differing_shards)


def compress_shards(world: World) -> None:
    _, model = wrapped()
    with pytest.raises(UsageError, match=r"^Int8: 'up\.weight' is tensor-parallel, and tensor-parallel parameters"):
        Int8(model)


def test_shards_are_not_compressed(pools: Pools) -> None:
    pools.run(4, compress_shards)


def join_with_shards(world: World) -> None:
    """Take one more step on rank 1 than on rank 0, inside ``join``."""
    module, model = wrapped((2, 1))
    optimizer = make_optimizer("sgd", model)
    with model.join():
        for step in range(1 + world.rank):
            summed_loss(model(batch_of(step + 10 * world.rank, 2)[0], True), batch_of(step, 2)[1]).backward()
            optimizer.step()
            optimizer.zero_grad()
    mine = module.up.weight.to_local().detach()
    values = [torch.empty_like(mine) for _ in range(2)]
    dist.all_gather(values, mine)
    assert torch.equal(*values)


def test_sharded_parameters_are_equal_after_join(pools: Pools) -> None:
    pools.run(2, join_with_shards)
