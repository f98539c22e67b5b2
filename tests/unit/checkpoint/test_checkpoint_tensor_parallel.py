"""Tensor parallelism: DTensors are saved unsharded and loaded onto meshes of any shape."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from test_checkpoint_ranks import Holder, raised
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from paceline import load_weights
from paceline.checkpoint import Checkpointer
from paceline.core.torch_distributed import is_sharded, whole_of
from paceline.core.world import World
from twins import Pools


def model_on(world: World) -> nn.Module:
    """Return a feed-forward net whose parameters are sharded over the ranks."""
    torch.manual_seed(5)
    module = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
    if world.size > 1:
        mesh = init_device_mesh("cpu", (world.size,))
        parallelize_module(module, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    return module


def step(module: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    inputs = torch.randn(6, 4, generator=torch.Generator().manual_seed(number))
    module(inputs).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def whole_state(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    found = dict(module.state_dict())
    for index, state in optimizer.state_dict()["state"].items():
        found.update({f"{index}.{name}": value for name, value in state.items()})
    return {name: whole_of(value) if is_sharded(value) else value for name, value in found.items()}


def run(world: World, folder: str, async_save: bool) -> tuple[dict[str, torch.Tensor], bool]:
    """Restore a checkpoint if there is one, else train and save. Return the unsharded state."""
    module = model_on(world)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.05)
    with Checkpointer(folder, async_save=async_save) as checkpointer, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        checkpointer.register("model", module)
        checkpointer.register("optimizer", optimizer)
        start = checkpointer.restore() if checkpointer.steps() else 0
        kinds = all(is_sharded(each) for each in module.parameters() if world.size > 1 and each.dim() == 2)
        for number in range(start, 3):
            step(module, optimizer, number)
        if not start:
            checkpointer.save(3)
        return whole_state(module, optimizer), kinds


@pytest.mark.parametrize(("async_save", "before", "now"), [(False, 1, 2), (True, 2, 1)])
def test_the_world_size_may_change(pools: Pools, tmp_path: Path, async_save: bool, before: int, now: int) -> None:
    saved = pools.run(before, run, str(tmp_path), async_save)[0][0]
    for restored, are_sharded in pools.run(now, run, str(tmp_path), async_save):
        assert are_sharded
        assert restored.keys() == saved.keys()
        for name, value in saved.items():
            assert torch.equal(restored[name], value), name
    weights = load_weights(tmp_path)
    assert torch.equal(weights["0.weight"], saved["0.weight"])


def one_rank_fails(world: World, folder: str) -> tuple[str, str]:
    with Checkpointer(folder) as checkpointer:
        own = checkpointer.register("own", Holder({"rank": world.rank}))
        checkpointer.register("model", model_on(world))
        if world.rank == 1:
            own.state = {"cannot": object()}
        return raised(checkpointer.save, 1)


def test_an_error_on_one_rank_does_not_leave_others_waiting_for_shards(pools: Pools, tmp_path: Path) -> None:
    for kind, message in pools.run(2, one_rank_fails, str(tmp_path)):
        assert kind in ("UsageError", "CheckpointError")
        assert "own.state_dict()['cannot'] is a builtins.object" in message


def refused(world: World, folder: str) -> tuple[tuple[str, str], bool]:
    module: Any = model_on(world)
    with Checkpointer(folder) as checkpointer:
        checkpointer.register("model", module)
        last = checkpointer.register("zlast", Holder({"rank": world.rank, "refuse": -1}))
        checkpointer.save(1)
        last.state = {"rank": world.rank, "refuse": 1}
        checkpointer.save(2)
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.zero_()
        failure = raised(checkpointer.restore)
        return failure, all(not whole_of(each).any() for each in module.parameters() if is_sharded(each))


def test_a_refused_restore_rolls_back_shards(pools: Pools, tmp_path: Path) -> None:
    for (kind, _), is_as_before in pools.run(2, refused, str(tmp_path)):
        assert kind == "CheckpointMismatch"
        assert is_as_before
