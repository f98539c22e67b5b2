"""Promise: BatchNorm models equal one process that runs the ranks' slices in turn and keeps the buffers of slice 0."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from paceline.core.world import World
from paceline.ddp import DistributedDataParallel
from twins import INPUTS, OUTPUTS, Pools, global_batch, same_gradients, same_tensor, same_weights


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


def train(world: World, broadcast: bool, forwards: int) -> list[str]:
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
    results = pools.run(3, train, broadcast, forwards)
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
