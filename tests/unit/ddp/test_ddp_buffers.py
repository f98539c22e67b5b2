"""Buffers: equal on all ranks between steps, so an evaluation gives the same result on every rank; and BatchNorm.

Buffers used to be broadcast before each training forward only, so evaluations used local BatchNorm statistics: rank 1
of an ImageNet script reported a test loss of 4.6577 and rank 0 reported 4.6599.
"""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from insides import keep_versions
from paceline import World
from paceline.ddp import DistributedDataParallel
from paceline.errors import CommunicationError, DesyncError
from twins import INPUTS, OUTPUTS, Pools, global_batch, same_gradients, same_tensor, same_weights


class Model(nn.Module):
    """BatchNorm, whose buffers have two dtypes, and unusual kinds of buffers."""

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


def assert_equal_on_all_ranks(module: nn.Module, where: str) -> None:
    for name, buffer in module.named_buffers():
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, buffer)
        assert all(torch.equal(other, everyone[0]) for other in everyone), f"{where}: {name} {everyone}"


class TorchDDP(nn.parallel.DistributedDataParallel):
    """Torch DDP with a workaround for torch 2.11, which fails in a backward after two forwards."""

    def _sync_buffers(self) -> None:
        with keep_versions(tuple(self.module.buffers())):
            super()._sync_buffers()


def compare_with_torch(world: World, forwards: int, accumulated: int) -> None:
    ours, theirs = DistributedDataParallel(Model()), TorchDDP(Model())
    optimizers = [torch.optim.SGD(model.parameters(), 0.1) for model in (ours, theirs)]
    for step in range(4):
        for model, optimizer in zip((ours, theirs), optimizers, strict=True):
            optimizer.zero_grad()
            for part in range(accumulated):
                with model.no_sync() if part < accumulated - 1 else nullcontext():
                    sum(model(batch(world, step + 7 * n)).square().mean() for n in range(forwards)).backward()
            optimizer.step()
        assert_equal_on_all_ranks(ours, f"step {step}")
        if world.rank == 0:  # evaluates alone, without any collective
            ours.eval(), ours(batch(world, 0)), ours.train()
            for (name, mine), other in zip(ours.named_buffers(), theirs.buffers(), strict=True):
                assert torch.equal(mine, other), f"step {step}: {name}"
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine, other)


@pytest.mark.parametrize(("forwards", "accumulated"), [(2, 1), (1, 3)])
def test_buffers_equal_rank_0_after_each_step(pools: Pools, forwards: int, accumulated: int) -> None:
    pools.run(2, compare_with_torch, forwards, accumulated)


def train_unevenly(world: World, forwards: int) -> None:
    """Train with no data on rank 1 in some steps and fewer micro-batches in others."""
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
        assert_equal_on_all_ranks(model, f"step {step}")


@pytest.mark.parametrize("forwards", [1, 3])
def test_buffers_stay_equal_when_a_rank_has_less_data(pools: Pools, forwards: int) -> None:
    pools.run(2, train_unevenly, forwards)


def fail_once(world: World) -> list[str]:
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
    assert_equal_on_all_ranks(model, "at the end")
    return log


def test_buffers_stay_equal_after_a_failed_backward_on_one_rank(pools: Pools) -> None:
    first, second = pools.run(2, fail_once)
    assert first == ["fine", "DesyncError", "fine", "fine"]
    assert second == ["fine", "ValueError", "fine", "fine"]


class Codebook(nn.Module):
    """Creates a buffer from the first batch, like a vector quantizer."""

    def __init__(self, persistent: bool, rows: list[Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 2)
        self.register_buffer("other", torch.zeros(1))  # without it torch DDP synchronizes no buffers
        self.register_buffer("code", None, persistent=persistent)
        self.rows = rows

    def forward(self, x: Tensor) -> Tensor:
        if self.code is None:
            rows = self.rows[dist.get_rank()]
            self.code = x.detach()[0, : rows[0]].clone() if isinstance(rows, list) else x.detach()[:rows].clone()
        return self.layer(x + self.code.sum())


def train_codebook(world: World, wrapper: type[Any]) -> list[Any]:
    """Return the buffer after each step."""
    model = wrapper(Codebook(True, [3] * world.size))
    codes: list[Any] = []
    for step in range(3):
        model(batch(world, step)).sum().backward()
        model.zero_grad()
        codes.append(model.module.code.tolist())
    return codes


def test_buffer_created_by_the_first_batch_is_broadcast_from_rank_0(pools: Pools) -> None:
    """Each rank kept its own codebook, so the replicas diverged."""
    first, second = pools.run(2, train_codebook, DistributedDataParallel)
    assert first == second
    assert pools.run(2, train_codebook, TorchDDP)[1][1:] == first[1:]


def train_unequal_codebooks(world: World, persistent: bool, rows: list[Any]) -> str:
    model = DistributedDataParallel(Codebook(persistent, rows))
    try:
        for step in range(2):
            model(batch(world, step)).sum().backward()
    except (DesyncError, CommunicationError) as error:
        return str(error)
    return ""


@pytest.mark.parametrize("rows", [[0, 1], [[1], [2]]])
def test_buffers_of_different_shapes_are_refused_unless_nonpersistent(pools: Pools, rows: list[Any]) -> None:
    """Comparing bytes alone misses a difference hidden by padding, such as one number against two."""
    assert pools.run(2, train_unequal_codebooks, False, rows) == ["", ""]
    messages = [" ".join(message.split()) for message in pools.run(2, train_unequal_codebooks, True, rows)]
    assert all("its new buffers are other [1], code [" in text and "persistent=False" in text for text in messages)


def norms_without_statistics(world: World) -> bool:
    return DistributedDataParallel(nn.Sequential(nn.Linear(2, 2), nn.InstanceNorm1d(2))).will_sync_module_buffers()


def test_norms_without_statistics_have_no_buffers(pools: Pools) -> None:
    assert pools.run(2, norms_without_statistics) == [False, False]


# -- BatchNorm equals one process that runs the slices in turn ---------------------------------------------------------


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(INPUTS, 6, dtype=torch.float64)
        self.norm = nn.BatchNorm1d(6, dtype=torch.float64)
        self.last = nn.Linear(6, OUTPUTS, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.first(x)).tanh())


def copy_buffers(module: nn.Module) -> list[Tensor]:
    return [buffer.clone() for buffer in module.buffers()]


def set_buffers(module: nn.Module, values: list[Tensor]) -> None:
    for buffer, value in zip(module.buffers(), values, strict=True):
        buffer.data.copy_(value)


def loss_of(model: nn.Module, x: Tensor, y: Tensor, forwards: int) -> Tensor:
    return sum(((model(x + k) - y) ** 2).mean() for k in range(forwards))  # type: ignore[return-value]


def train_normed(world: World, broadcast: bool, forwards: int) -> list[str]:
    torch.manual_seed(0)
    module = Normed()
    twin = copy.deepcopy(module)
    model = DistributedDataParallel(module, broadcast_buffers=broadcast)
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in (module, twin)]
    twins = [copy_buffers(twin) for _ in range(world.size)]  # the running statistics of each slice
    for step in range(4):
        x, y = global_batch(step, 5 * world.size)
        slices = list(zip(x.tensor_split(world.size), y.tensor_split(world.size), strict=True))
        loss_of(model, *slices[world.rank], forwards).backward()
        outcome, seen_by_0 = [], []
        for rank, (xs, ys) in enumerate(slices):
            set_buffers(twin, twins[rank])
            losses = []
            for k in range(forwards):
                if rank == 0:
                    seen_by_0.append(copy_buffers(twin))
                elif broadcast:  # every forward starts from rank 0's current buffers
                    set_buffers(twin, seen_by_0[k])
                losses.append(((twin(xs + k) - ys) ** 2).mean())
            (torch.stack(losses).sum() / world.size).backward()
            outcome.append(copy_buffers(twin))
        twins = outcome
        # With broadcasts, the buffers between steps equal rank 0's.
        for mine, others in zip(module.buffers(), twins[0 if broadcast else world.rank], strict=True):
            same_tensor(mine.double(), others.double(), 1e-9, f"buffer in step {step}")
        same_gradients(module, twin)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        same_weights(module, twin)
    model.sync_buffers()
    if broadcast:
        for mine, first in zip(module.buffers(), twins[0], strict=True):
            same_tensor(mine.double(), first.double(), 1e-9, "buffer after sync_buffers()")
    return [str(buffer.tolist()) for buffer in module.buffers()]


@pytest.mark.parametrize(("broadcast", "forwards"), [(True, 1), (True, 2), (False, 2)])
def test_training_equals_running_the_slices_in_turn(pools: Pools, broadcast: bool, forwards: int) -> None:
    """Two forwards before one backward would fail if buffers were broadcast in place."""
    results = pools.run(3, train_normed, broadcast, forwards)
    assert (len({str(result) for result in results}) == 1) == broadcast


def evaluate_on_rank_0(world: World) -> None:
    torch.manual_seed(0)
    model = DistributedDataParallel(Normed())
    for step in range(3):
        x, y = global_batch(10 * world.rank + step, 4)
        loss_of(model, x, y, 1).backward()
        if world.rank == 0:
            with torch.no_grad():
                model(x)
                model.eval()
                model(x)
            assert model(x).requires_grad
            model.train()


def test_evaluation_on_rank_0_needs_no_other_rank(pools: Pools) -> None:
    pools.run(2, evaluate_on_rank_0)
