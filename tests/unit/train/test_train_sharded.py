"""A Trainer with a sharded optimizer comes to the bits of one without, also where one goes on from the other."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from paceline.core.processes.world import World
from paceline.optim import ShardedOptimizer
from paceline.tools.recipes.lm import MuonAndAdamW
from trainings import Run, Settings, train
from twins import Pools


def run(folder: Path | None = None, sharded: bool = False, **options: object) -> Run:
    settings = {"epochs": 2, "clip_norm": 0.5, "show_progress": False, **options}
    settings["schedule"] = {"warmup_steps": 2, "decay": "cosine", "total_steps": 12}
    if folder is not None:
        settings |= {"checkpoint_dir": str(folder), "checkpoint_every": 1}
    return Run(Settings(**settings), adam=True, sharded=sharded)  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2])
def test_weights_are_those_of_the_unsharded_optimizer(pools: Pools, tmp_path: Path, size: int) -> None:
    plain = pools.run(size, train, run())[0].weights_sha256
    assert plain == pools.run(size, train, run(sharded=True))[0].weights_sha256
    first = replace(run(tmp_path, sharded=True), stop_after=4)
    pools.run(size, train, first)
    assert plain == pools.run(size, train, run(tmp_path, resume=True))[0].weights_sha256


def of_muon_and_adamw(world: World) -> bool:
    found = []
    for is_sharded in (False, True):
        torch.manual_seed(0)
        layer = torch.nn.Linear(20, 30)
        optimizer = MuonAndAdamW([layer.weight], [layer.bias], lr=0.1)
        trained = ShardedOptimizer.of(optimizer) if is_sharded else optimizer
        for _ in range(3):
            layer(torch.ones(4, 20)).sum().backward()
            trained.step()
            trained.zero_grad()
        found.append(layer.weight.detach().clone())
    return torch.equal(*found)


def test_an_optimizer_with_arguments_of_its_own_is_shared_out_by_tensors(pools: Pools) -> None:
    assert pools.run(2, of_muon_and_adamw) == [True, True]
