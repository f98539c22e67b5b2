"""ask_to_stop(): one rank's request reaches all in the next synchronized backward, and costs nothing in other steps."""

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


def asking(world: World, asker: int, at: int, weighted: bool, kind: str) -> list[bool]:
    """Train 6 steps; rank `asker` asks after step `at`. What each step says at its end."""
    with patch.dict(os.environ, {TEST_HOST_CHANNEL: "always"} if kind == "read late" else {}):
        model = DistributedDataParallel(chain(4, 8, 2))
    if kind == "copy":
        model = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    said = []
    for step in range(1, 7):
        if weighted:
            with model.weight(2):
                model(torch.ones(2, 4)).sum().backward()
            assert model.total_weight == 2 * world.size
        else:
            model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        said.append(model.stop_agreed)
        if world.rank == asker and step == at:
            model.ask_to_stop()
            said[-1] = said[-1] or model.stop_agreed
    return said


@pytest.mark.parametrize(
    ("size", "asker", "weighted", "kind"),
    [(1, 0, False, "wrapper"), (2, 1, False, "copy"), (2, 1, True, "read late"), (3, 0, True, "wrapper")],
)
def test_all_ranks_know_it_after_the_next_step(pools: Pools, size: int, asker: int, weighted: bool, kind: str) -> None:
    for at in (1, 4):
        for said in pools.run(size, asking, asker, at, weighted, kind):
            assert said == [step > at for step in range(1, 7)]


def local_and_late(world: World) -> list[bool]:
    model = DistributedDataParallel(chain(4, 8, 2))
    said = []
    if world.rank == 0:
        model.ask_to_stop()
    with model.no_sync():
        model(torch.ones(2, 4)).sum().backward()
    said.append(model.stop_agreed)
    model.sync_gradients()
    return [*said, model.stop_agreed]


@pytest.mark.parametrize("size", [1, 2])
def test_a_local_backward_tells_nobody_and_a_synchronization_does(pools: Pools, size: int) -> None:
    assert pools.run(size, local_and_late) == [[False, True]] * size
