"""Optimizer settings that differ between ranks are detected in the first backward after the difference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer

from models import chain
from paceline.core.world import World
from paceline.ddp import DistributedDataParallel
from paceline.errors import ReplicaMismatch
from paceline.optim import ShardedOptimizer
from twins import Pools

Make = Callable[[nn.Module, int], Optimizer]


def adamw(net: nn.Module, rank: int, **options: Any) -> Optimizer:
    return AdamW(net.parameters(), **{"lr": 0.01} | options)


def with_local_group(net: nn.Module, rank: int) -> Optimizer:
    local = {"params": [nn.Parameter(torch.ones(2))], "lr": 0.1 * (rank + 1)}
    return SGD([{"params": list(net.parameters())}, local], lr=0.01)


def with_key_of_the_program(net: nn.Module, rank: int) -> Optimizer:
    return SGD([{"params": list(net.parameters()), "rank": rank}], lr=0.01)


def in_groups(net: Any, rank: int, last: float = 0.01) -> Optimizer:
    groups: list[dict[str, Any]] = [{"params": net[:2].parameters()}, {"params": net[2].parameters(), "lr": last}]
    return SGD(groups[::-1] if rank else groups, lr=0.01)


DIFFERENT: dict[str, tuple[Make, str, Any, str]] = {
    "lr": (adamw, "lr", 0.02, "rank 0 has 0.01, rank 1 has 0.02 as lr in group 0 of AdamW"),
    "betas": (adamw, "betas", (0.8, 0.9), "rank 1 has (0.8, 0.9) as betas in group 0"),
    "lr in a tensor": (lambda net, rank: adamw(net, rank, lr=torch.tensor(0.5)), "lr", 0.25, "rank 1 has 0.25 as lr"),
    "lr of different groups": (in_groups, "lr", 0.5, "rank 0 has 0.01, rank 1 has 0.5 as lr in group 1 of SGD"),
    "lr from NumPy": (adamw, "lr", np.float32(0.5), "rank 1 has 0.5 as lr"),
    "sharded": (lambda net, _: ShardedOptimizer(net.parameters(), SGD, lr=0.5), "lr", 0.25, "rank 1 has 0.25 as lr"),
}
LEGITIMATE: dict[str, Make] = {
    "equal": adamw,
    "a local parameter group": with_local_group,
    "a user-defined key": with_key_of_the_program,
    "numbers of other types": lambda net, rank: adamw(net, rank, lr=1, betas=(0.5, np.float64(0.5) if rank else 0.5)),
    "groups in another order": lambda net, rank: in_groups(net, rank, last=0.02),
    "sharded by hand": lambda net, rank: SGD(net[rank].parameters(), lr=0.01 * (rank + 1)),  # type: ignore[index]
}


def steps_until_refused(world: World, case: str) -> tuple[int, str, bool]:
    make, name, value, _ = DIFFERENT.get(case) or (LEGITIMATE[case], "", None, "")
    net = chain(3, 4, 4, 2)
    model = DistributedDataParallel(net, check_replicas_every=100)
    optimizer = make(nn.Sequential(*(part for part in net if isinstance(part, nn.Linear))), world.rank)
    for step in range(12):
        asked = model._replica.ledger.settings.comparisons_left
        try:
            model(torch.ones(2, 3)).sum().backward()
        except ReplicaMismatch as error:
            return step, str(error), True
        optimizer.step()
        optimizer.zero_grad()
        if name and step == 2 and world.rank == 1:
            group = optimizer.param_groups[0]
            if isinstance(group[name], torch.Tensor):
                group[name].fill_(value)
            else:
                group[name] = value
    return 12, "", asked != model._replica.ledger.settings.comparisons_left


@pytest.mark.parametrize("case", DIFFERENT)
def test_differing_setting_is_named_before_it_is_used(pools: Pools, case: str) -> None:
    """A differing learning rate used to be detected many steps later, and without its name."""
    for step, text, _ in pools.run(2, steps_until_refused, case):
        assert step == 3
        assert DIFFERENT[case][-1] in text


@pytest.mark.parametrize("case", LEGITIMATE)
def test_legitimate_differences_in_settings_are_allowed(pools: Pools, case: str) -> None:
    for step, _, asks in pools.run(2, steps_until_refused, case):
        assert step == 12
        assert not asks, "the ranks still exchange their settings"


def train_with_two_classes(world: World) -> str:
    net = chain(3, 4, 2)
    model = DistributedDataParallel(net)
    optimizer = (SGD, AdamW)[world.rank](net.parameters(), lr=0.1, weight_decay=0.0)
    for _ in range(5):
        try:
            model(torch.ones(2, 3)).sum().backward()
        except ReplicaMismatch as error:
            return str(error)
        optimizer.step()
        optimizer.zero_grad()
    return ""


def test_replicas_are_compared_when_settings_cannot_be(pools: Pools) -> None:
    assert all("has different bits on rank 1" in text for text in pools.run(2, train_with_two_classes))
