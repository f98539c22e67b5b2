"""Checkpoints of sharded optimizers and DTensors, which any number of ranks can load."""

from __future__ import annotations

import json
import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from test_checkpoint_ranks import Holder, raised
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.optim import AdamW

import paceline
from insides import is_sharded, read_specs, whole_of
from paceline import World, load_weights
from paceline.checkpoint import Checkpointer
from paceline.errors import CheckpointMismatch, CheckpointWarning
from paceline.optim import ShardedOptimizer
from processes import run_here
from twins import Pools


def opened(
    folder: str, kind: str, background: bool = False, kind_of_optimizer: Any = AdamW
) -> tuple[nn.Module, Any, Any, paceline.Checkpointer]:
    torch.manual_seed(4)
    model = paceline.DistributedDataParallel(nn.Sequential(nn.Linear(7, 99), nn.Tanh(), nn.Linear(99, 4)))
    options = {"by": "tensor"} if kind == "tensor" else {}
    optimizer: Any = AdamW(model.parameters(), lr=0.01)
    if kind != "plain":
        optimizer = ShardedOptimizer(model, kind_of_optimizer, lr=0.01, **options)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer)
    checkpointer = paceline.Checkpointer(folder, async_save=background)
    for name, each in (("optimizer", optimizer), ("model", model), ("scheduler", scheduler)):
        checkpointer.register(name, each)
    return model, optimizer, scheduler, checkpointer


def train(model: nn.Module, optimizer: Any, scheduler: Any, first: int, last: int) -> None:
    for step in range(first, last):
        x = torch.randn(6, 7, generator=torch.Generator().manual_seed(step))
        F.cross_entropy(model(x), torch.arange(6) % 4).backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()


def saved(world: World, folder: str, kinds: list[str]) -> None:
    for kind in kinds:
        model, optimizer, scheduler, checkpointer = opened(f"{folder}/{kind}{world.size}", kind, kind == "tensor")
        train(model, optimizer, scheduler, 0, 3)
        checkpointer.save(3)
        checkpointer.close()


def resumed(world: World, folder: str, kinds: list[str]) -> list[list[Tensor]]:
    found = []
    for kind in kinds:
        model, optimizer, scheduler, checkpointer = opened(folder, kind)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", CheckpointWarning)  # about random generators
            first = checkpointer.restore()
        checkpointer.close()
        train(model, optimizer, scheduler, first, 6)
        found.append([parameter.detach().clone() for parameter in model.parameters()])
    return found


@pytest.mark.slow
def test_any_number_of_ranks_loads_it_sharded_or_not(pools: Pools, tmp_path: Path) -> None:
    for size, kinds in ((1, ["sharded"]), (2, ["plain", "sharded", "tensor"]), (4, ["sharded"])):
        pools.run(size, saved, str(tmp_path), kinds)
    for size, saves in ((1, ("plain2", "sharded2", "tensor2", "sharded4")), (2, ("plain2", "sharded1", "sharded4"))):
        for before in saves:
            results = pools.run(size, resumed, str(tmp_path / before), ["plain", "sharded"])
            [expected, _], *_ = results
            reference = [expected for _ in range(2)]
            for result in results:
                assert all(map(torch.equal, result[0] + result[1], reference[0] + reference[1])), (size, before)
    saves = ("plain2", "sharded2", "sharded4")
    every = [pools.run(1, resumed, str(tmp_path / name), ["plain"])[0][0] for name in saves]
    assert all(all(map(torch.equal, each, every[0])) for each in every)  # dividing equal sums by two or four is exact


def moments(file: Path) -> int:
    """Count the elements of Adam's moments in a tensor file."""
    return sum(math.prod(spec.shape) for name, spec in read_specs(file).items() if "exp_avg" in name)


def restore_other_class(world: World, folder: str) -> str:
    *_, checkpointer = opened(folder, "sharded", kind_of_optimizer=torch.optim.SGD)
    with checkpointer, pytest.raises(CheckpointMismatch) as caught:
        checkpointer.restore()
    return str(caught.value)


def test_each_rank_writes_only_its_shard_and_the_sharded_class_is_compared(pools: Pools, tmp_path: Path) -> None:
    pools.run(2, saved, str(tmp_path), ["plain", "sharded"])
    folder = tmp_path / "sharded2" / "step-00000003"
    shares = [moments(folder / f"rank-0000{rank}.safetensors") for rank in range(2)]
    assert not (folder / "optimizer.safetensors").exists()
    assert sum(shares) == moments(tmp_path / "plain2" / "step-00000003" / "optimizer.safetensors")
    assert max(shares) - min(shares) <= 2 * 2 * 128
    for message in pools.run(2, restore_other_class, str(tmp_path / "sharded2")):
        assert "'optimizer' is of class SGD in this run but of class AdamW in the checkpoint" in message


def test_commands_handle_shards(
    pools: Pools, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def of_command(*arguments: object) -> Any:
        """Return the JSON output of `paceline checkpoint`, which must exit with code 0."""
        assert not run_here(monkeypatch, "checkpoint", *map(str, arguments))
        out = capfd.readouterr().out
        return json.loads(out) if "--json" in arguments else out

    pools.run(2, saved, str(tmp_path), ["sharded", "plain"])
    capfd.readouterr()
    assert of_command("verify", tmp_path / "sharded2", "--json")["damaged"] == []
    for source in ("sharded2", "plain2"):
        of_command("export", tmp_path / source, "--name", "optimizer", "--out", tmp_path / f"{source}.pt")
    whole, plain = (torch.load(tmp_path / f"{source}.pt", weights_only=True) for source in ("sharded2", "plain2"))
    assert whole["state"].keys() == plain["state"].keys()
    for index, entry in plain["state"].items():
        assert all(torch.equal(whole["state"][index][key], value) for key, value in entry.items())
    net = nn.Sequential(nn.Linear(7, 99), nn.Tanh(), nn.Linear(99, 4))
    AdamW(net.parameters()).load_state_dict(whole)


# -- tensor parallelism ------------------------------------------------------------------------------------------------


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
