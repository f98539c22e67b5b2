from __future__ import annotations

import os
import sys
import warnings
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import paceline
from paceline.comm.topology import SPLIT, Refused, memory_identity
from paceline.core.world import World
from ranks import Pools

# -- one machine, split by force, or without shared memory -------------------------------------------------------------


def trained(world: World, hosts: int) -> Tensor:
    """Return the parameters after three steps of our DDP on a world split into hosts."""
    with patch.dict(os.environ, {SPLIT: str(hosts)}):
        torch.manual_seed(0)
        model = paceline.DistributedDataParallel(nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(3):
        optimizer.zero_grad()
        model(torch.full((2, 16), 0.1 * (step + world.rank))).square().mean().backward()
        optimizer.step()
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def test_ddp_trains_over_hosts_as_on_one(pools: Pools) -> None:
    one, two = pools.run(2, trained, 1), pools.run(2, trained, 2)
    assert all(torch.equal(result, two[0]) for result in two)
    # The order of sums differs; a weight may be close to zero while its gradients are not.
    torch.testing.assert_close(two[0], one[0], rtol=1e-5, atol=1e-5)


def refused(*_: Any) -> Any:
    raise PermissionError(1, "memfd_create is forbidden here")


def over_gloo(world: World, hosts: int) -> list[str]:
    """Create a group of `hosts` hosts and return its warnings. With one host, rank 1 cannot allocate shared memory."""
    with ExitStack() as stack:
        stack.enter_context(patch.dict(os.environ, {SPLIT: str(hosts)}))
        if hosts == 1 and world.rank == 1:
            stack.enter_context(patch.object(os, "memfd_create", refused))
        caught = stack.enter_context(warnings.catch_warnings(record=True))
        warnings.simplefilter("always")
        group: Any = dist.new_group(backend="paceline")
    assert (group.native, group.getBackendName()) == (False, "paceline")
    tensor = torch.ones(3)
    dist.all_reduce(tensor, group=group)
    assert tensor.tolist() == [world.size] * 3
    with pytest.raises(paceline.UsageError, match="does not use shared memory"):
        group.allocate(3, torch.float32)
    return [str(one.message) for one in caught]


@pytest.mark.parametrize(
    ("hosts", "why"),
    [
        (2, "the 2 ranks are on 2 hosts"),
        (1, "rank 1: the system refuses it: [Errno 1] memfd_create is forbidden here"),
    ],
)
def test_without_shared_memory_gloo_is_used_and_rank_0_says_why(pools: Pools, hosts: int, why: str) -> None:
    messages = pools.run(2, over_gloo, hosts)
    assert messages == [[f"the process group uses Gloo, not shared memory: {why}"], []]


def test_shared_memory_needs_linux(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(Refused, match="shared memory between ranks needs Linux, this is darwin"):
        memory_identity(0, 2)
