"""Steps of virtual ranks that are abandoned by ``break`` or an exception do not affect later steps.

An abandoned step used to stay open: later forwards collected statistics for it, so ``update_bn`` failed, and buffers
stayed local.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from models import Average, Trip
from paceline.core.world import World
from paceline.data import DataLoader
from paceline.ddp import DistributedDataParallel, accumulate
from ranks import Pools
from sliced import bits


class Training:
    """A model and data for two steps."""

    def __init__(self, virtual_ranks: int) -> None:
        torch.manual_seed(3)
        self.module = nn.Sequential(Average(), nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))
        self.model = DistributedDataParallel(self.module, virtual_ranks=virtual_ranks)
        self.data = TensorDataset(torch.randn(32, 8), torch.arange(32) % 4)

    def leave(self, way: str, number: int) -> None:
        """Abandon the first step at slice `number` of the loop."""
        try:
            for count, (x, y) in enumerate(accumulate(self.model, DataLoader(self.data, 16))):
                out = self.model(x)
                if count == number and way == "break":
                    break
                if count == number and way == "exception":
                    raise ArithmeticError("in the loop")
                F.cross_entropy(Trip.apply(out) if count == number else out, y).backward()
        except ArithmeticError:
            pass
        self.model.zero_grad()

    def train(self) -> bytes:
        """Train two steps and return weights and buffers."""
        optimizer = torch.optim.SGD(self.module.parameters(), lr=0.1)
        for x, y in accumulate(self.model, DataLoader(self.data, 16)):
            F.cross_entropy(self.model(x), y).backward()
            if self.model.do_sync:
                optimizer.step()
                optimizer.zero_grad()
        return bits(self.module)


def train_after_abandoned_step(world: World, virtual_ranks: int, leaves: list[tuple[str, list[int]]]) -> set[Any]:
    """Train after abandoning a step in several ways; return the weights and the names of changed buffers."""
    results: set[Any] = set()
    for way, numbers in leaves:
        training = Training(virtual_ranks)
        module, before = training.module, copy.deepcopy(training.module.state_dict())
        if numbers:
            training.leave(way, numbers[world.rank % len(numbers)])
            if virtual_ranks > world.size:  # otherwise buffers are synchronized when the next step begins
                results |= {name for name, value in module.state_dict().items() if not torch.equal(value, before[name])}
            plain, batches = copy.deepcopy(module), list(torch.randn(2, 16, 8))
            torch.optim.swa_utils.update_bn(batches, training.model)
            torch.optim.swa_utils.update_bn(batches, plain)
            if not torch.equal(module[2].running_mean, plain[2].running_mean):
                results.add("recomputed statistics")
        module.load_state_dict(before)
        results.add(training.train())
    return results


LAST_OF_FOUR = {1: 3, 2: 1}
"""Index of a rank's last slice by number of ranks, for four virtual ranks."""


@pytest.mark.parametrize("size", [1, 2])
def test_abandoned_step_does_not_affect_later_steps(pools: Pools, size: int) -> None:
    leaves: list[tuple[str, list[int]]] = [("", []), ("break", [0]), ("exception", [0]), ("backward", [0])]
    last = LAST_OF_FOUR[size]
    leaves += [("exception", [last]), ("backward", [last]), ("break", [0, last])]
    assert [len(results) for results in pools.run(size, train_after_abandoned_step, 4, leaves)] == [1] * size
    if size == 2:
        leaves = [("", []), ("break", [0]), ("backward", [0])]
        assert [len(results) for results in pools.run(size, train_after_abandoned_step, 2, leaves)] == [1] * size
