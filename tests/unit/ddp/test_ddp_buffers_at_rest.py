"""Buffers are equal on every rank between steps, so that an evaluation is the same everywhere, also on one rank alone.

Broadcast before each training forward, BatchNorm's running statistics were each rank's own when it was evaluated: rank
1 of an ImageNet script reported a test loss of 4.6577 where rank 0 had 4.6599.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from insides import keep_versions
from paceline.core.world import World
from paceline.ddp import DistributedDataParallel
from paceline.errors import CommunicationError, DesyncError
from twins import Pools


class Model(nn.Module):
    """BatchNorm, whose buffers are of two dtypes, and buffers of other kinds."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 2))
        self.register_buffer("seen", torch.zeros(3, dtype=torch.bool))
        self.register_buffer("empty", torch.zeros(0))
        self.register_buffer("strided", torch.zeros(4, 6).t())
        self.register_buffer("conjugate", torch.zeros(2, dtype=torch.complex64).conj())
        self.register_buffer("negative", torch.zeros(2, dtype=torch.complex64).conj().imag)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen[int(x.abs().sum()) % 3] = True
            self.strided.add_(x.mean())
            self.conjugate.add_(1j * x.mean())
            self.negative.add_(x.mean())
        return self.layers(x)


def batch(world: World, step: int) -> Tensor:
    return torch.randn(5, 4, generator=torch.Generator().manual_seed(10 * step + world.rank))


def expect_same_everywhere(module: nn.Module, where: str) -> None:
    for name, buffer in module.named_buffers():
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, buffer)
        assert all(torch.equal(one, everyone[0]) for one in everyone), f"{where}: {name} {everyone}"


class TorchDDP(nn.parallel.DistributedDataParallel):
    """torch's, also in torch 2.11, where the second of two forwards before a backward made that backward fail."""

    def _sync_buffers(self) -> None:
        with keep_versions(tuple(self.module.buffers())):
            super()._sync_buffers()


def beside_torch(world: World, forwards: int, accumulated: int) -> None:
    ours, theirs = DistributedDataParallel(Model()), TorchDDP(Model())
    optimizers = [torch.optim.SGD(model.parameters(), 0.1) for model in (ours, theirs)]
    for step in range(4):
        for model, optimizer in zip((ours, theirs), optimizers, strict=True):
            optimizer.zero_grad()
            for part in range(accumulated):
                with model.no_sync() if part < accumulated - 1 else nullcontext():
                    sum(model(batch(world, step + 7 * n)).square().mean() for n in range(forwards)).backward()
            optimizer.step()
        expect_same_everywhere(ours, f"step {step}")
        if world.rank == 0:  # evaluated alone, without any collective
            ours.eval(), ours(batch(world, 0)), ours.train()
            for (name, mine), other in zip(ours.named_buffers(), theirs.buffers(), strict=True):
                assert torch.equal(mine, other), f"step {step}: {name}"
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine, other)


@pytest.mark.parametrize(("forwards", "accumulated"), [(2, 1), (1, 3)])
def test_buffers_are_rank_0s_after_each_step(pools: Pools, forwards: int, accumulated: int) -> None:
    pools.run(2, beside_torch, forwards, accumulated)


def uneven(world: World, forwards: int) -> None:
    """Rank 1 has no data in some steps, and fewer micro-batches in others."""
    model = DistributedDataParallel(Model())
    for step in range(6):
        model.zero_grad()
        has_data = world.rank == 0 or step % 3 != 0
        if has_data:
            for part in range(1 if world.rank else 3):
                with model.no_sync() if part < 2 and world.rank == 0 else nullcontext():
                    sum(model(batch(world, step)).square().mean() for _ in range(forwards)).backward()
        else:
            model.sync_gradients()
        expect_same_everywhere(model, f"step {step}")


@pytest.mark.parametrize("forwards", [1, 3])
def test_a_rank_without_data_or_with_fewer_micro_batches_takes_part(pools: Pools, forwards: int) -> None:
    pools.run(2, uneven, forwards)


def aborted(world: World) -> list[str]:
    model, fails, log = DistributedDataParallel(Model()), [False], []

    def fail(*_: object) -> None:
        if fails[0]:
            raise ValueError

    model.module.layers[0].register_full_backward_hook(fail)
    for step in range(4):
        model.zero_grad()
        fails[0] = step == 1 and world.rank == 1
        try:
            model(batch(world, step).requires_grad_()).square().mean().backward()
            log.append("fine")
        except Exception as error:
            log.append(type(error).__name__)
    expect_same_everywhere(model, "at the end")
    return log


def test_a_backward_that_fails_on_one_rank_leaves_buffers_equal(pools: Pools) -> None:
    first, second = pools.run(2, aborted)
    assert first == ["fine", "DesyncError", "fine", "fine"]
    assert second == ["fine", "ValueError", "fine", "fine"]


class Codebook(nn.Module):
    """Buffers that the first batch makes, as in a vector quantizer."""

    def __init__(self, persistent: bool, rows: list[Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 2)
        self.register_buffer("other", torch.zeros(1))  # or torch DDP synchronizes none of them
        self.register_buffer("code", None, persistent=persistent)
        self.rows = rows

    def forward(self, x: Tensor) -> Tensor:
        if self.code is None:
            rows = self.rows[dist.get_rank()]
            self.code = x.detach()[0, : rows[0]].clone() if isinstance(rows, list) else x.detach()[:rows].clone()
        return self.layer(x + self.code.sum())


def filled_later(world: World, wrapper: type[Any]) -> list[Any]:
    """The buffer is that of rank 0 from the second step on."""
    model = wrapper(Codebook(True, [3] * world.size))
    shown: list[Any] = []
    for step in range(3):
        model(batch(world, step)).sum().backward()
        model.zero_grad()
        shown.append(model.module.code.tolist())
    return shown


def test_a_buffer_that_the_first_batch_fills_is_rank_0s(pools: Pools) -> None:
    """Each rank kept a codebook of its own, and the replicas became different models."""
    first, second = pools.run(2, filled_later, DistributedDataParallel)
    assert first == second
    assert pools.run(2, filled_later, TorchDDP)[1][1:] == first[1:]


def of_other_shapes(world: World, persistent: bool, rows: list[Any]) -> str:
    model = DistributedDataParallel(Codebook(persistent, rows))
    try:
        for step in range(2):
            model(batch(world, step)).sum().backward()
    except (DesyncError, CommunicationError) as error:
        return str(error)
    return ""


@pytest.mark.parametrize("rows", [[0, 1], [[1], [2]]])
def test_buffers_of_another_shape_are_told_unless_they_are_caches(pools: Pools, rows: list[Any]) -> None:
    """The bytes alone do not tell where they are padded, as those of one number and of two."""
    assert pools.run(2, of_other_shapes, False, rows) == ["", ""]
    told = [" ".join(message.split()) for message in pools.run(2, of_other_shapes, True, rows)]
    assert all("its new buffers are other [1], code [" in message and "persistent=False" in message for message in told)


def norms_without_statistics(world: World) -> bool:
    return DistributedDataParallel(nn.Sequential(nn.Linear(2, 2), nn.InstanceNorm1d(2))).will_sync_module_buffers()


def test_norms_without_statistics_have_no_buffers(pools: Pools) -> None:
    assert pools.run(2, norms_without_statistics) == [False, False]
