"""ask_to_stop(): the request of one rank reaches all ranks in the next synchronized backward."""

from __future__ import annotations

import copy
import os
from unittest.mock import patch

import pytest
import torch

from models import chain
from paceline.core.world import World
from paceline.ddp import DistributedDataParallel
from paceline.ddp.channel import TEST_HOST_CHANNEL
from twins import Pools


def train_until_asked(world: World, asker: int, at: int, weighted: bool, kind: str) -> list[bool]:
    """Train 6 steps; rank `asker` asks to stop after step `at`. Return `stop_agreed` after each step."""
    with patch.dict(os.environ, {TEST_HOST_CHANNEL: "always"} if kind == "read late" else {}):
        model = DistributedDataParallel(chain(4, 8, 2))
    if kind == "copy":
        model = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    agreed = []
    for step in range(1, 7):
        if weighted:
            with model.weight(2):
                model(torch.ones(2, 4)).sum().backward()
            assert model.total_weight == 2 * world.size
        else:
            model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        agreed.append(model.stop_agreed)
        if world.rank == asker and step == at:
            model.ask_to_stop()
            agreed[-1] = agreed[-1] or model.stop_agreed
    return agreed


@pytest.mark.parametrize(
    ("size", "asker", "weighted", "kind"),
    [(1, 0, False, "wrapper"), (2, 1, False, "copy"), (2, 1, True, "read late"), (3, 0, True, "wrapper")],
)
def test_stop_request_reaches_all_ranks(pools: Pools, size: int, asker: int, weighted: bool, kind: str) -> None:
    for at in (1, 4):
        for agreed in pools.run(size, train_until_asked, asker, at, weighted, kind):
            assert agreed == [step > at for step in range(1, 7)]


def local_and_late(world: World) -> list[bool]:
    model = DistributedDataParallel(chain(4, 8, 2))
    agreed = []
    if world.rank == 0:
        model.ask_to_stop()
    with model.no_sync():
        model(torch.ones(2, 4)).sum().backward()
    agreed.append(model.stop_agreed)
    model.sync_gradients()
    return [*agreed, model.stop_agreed]


@pytest.mark.parametrize("size", [1, 2])
def test_stop_request_travels_with_the_next_synchronization(pools: Pools, size: int) -> None:
    assert pools.run(size, local_and_late) == [[False, True]] * size
