"""Checkpoints on several ranks: rank 0 decides, an error on one rank is raised on all, and per-rank state is kept."""

from __future__ import annotations

import itertools
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from test_checkpoint_damage import forge_state
from test_checkpoint_roundtrip import Holder as AnyHolder
from test_checkpoint_roundtrip import opened
from torch import nn
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import TensorDataset

from insides import rng_state
from paceline import World, set_seed
from paceline.checkpoint import Checkpointer
from paceline.data import DataLoader
from paceline.ddp import DistributedDataParallel
from paceline.errors import CheckpointError, CheckpointMismatch, DesyncError, NoCheckpoint, UsageError
from paceline.optim import ShardedOptimizer
from trainings import digest
from twins import Pools


class Holder(AnyHolder):
    """Refuses a state on the rank that this names as ``refuse``."""

    def load_state_dict(self, state: Any) -> None:
        if state.get("refuse", -1) == self.state.get("rank"):
            raise CheckpointMismatch(f"refused on rank {self.state['rank']}")
        super().load_state_dict(state)


def make(world: World, folder: str, seed: int, per_rank: bool = True) -> tuple[Checkpointer, Any, Any, Any]:
    torch.manual_seed(seed)
    model = nn.Linear(4, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    own = Holder({"residual": torch.full((world.rank,), float(world.rank)), "rank": world.rank})
    checkpointer = opened(Path(folder), {"model": model, "optimizer": optimizer})
    if per_rank:
        checkpointer.register("residual", own, per_rank=True)
    return checkpointer, model, optimizer, own


def save(world: World, folder: str, per_rank: bool = True) -> tuple[str, torch.Tensor, torch.Tensor]:
    checkpointer, model, _, _ = make(world, folder, seed=1, per_rank=per_rank)
    set_seed(11)
    path = checkpointer.save(7)
    checkpointer.close()
    return str(path), model.weight.detach(), torch.rand(3)


def restore(world: World, folder: str, per_rank: bool = True) -> tuple[Any, ...]:
    if world.rank:
        folder = f"/proc/nowhere-{world.rank}"  # only rank 0's host has the folder
    checkpointer, model, optimizer, own = make(world, folder, 2 + world.rank, per_rank)
    set_seed(12)
    fresh = torch.rand(3)
    set_seed(12)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        step = checkpointer.restore()
    checkpointer.close()
    return (
        step,
        model.weight.detach(),
        float(optimizer.state_dict()["state"][0]["step"]),
        own.state,
        (fresh, torch.rand(3)),
        [str(warning.message) for warning in caught],
    )


def test_every_rank_restores_its_own_state_and_generators(pools: Pools, tmp_path: Path) -> None:
    saved = pools.run(2, save, str(tmp_path))
    assert {path for path, _, _ in saved} == {str(tmp_path / "step-00000007")}
    assert not torch.equal(saved[0][2], saved[1][2])
    outcomes = pools.run(2, restore, str(tmp_path))
    for rank, (step, weight, optimizer_step, own, (_, drawn), warned) in enumerate(outcomes):
        assert (step, optimizer_step, warned) == (7, 1.0, [])
        assert torch.equal(weight, saved[0][1])
        assert own["rank"] == rank
        assert torch.equal(own["residual"], torch.full((rank,), float(rank)))
        assert torch.equal(drawn, saved[rank][2])


def test_a_different_world_size_restores_all_but_generators_with_a_warning(pools: Pools, tmp_path: Path) -> None:
    saved = pools.run(2, save, str(tmp_path), False)
    for size in (1, 3):
        outcomes = pools.run(size, restore, str(tmp_path), False)
        for rank, (step, weight, _, _, (fresh, drawn), warned) in enumerate(outcomes):
            assert step == 7
            assert torch.equal(weight, saved[0][1])
            assert torch.equal(fresh, drawn)
            assert len(warned) == (rank == 0)
            assert all(f"saved with world size 2 and this run has {size}" in message for message in warned)


def raised(function: Callable[..., Any], *arguments: Any) -> tuple[str, str]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            function(*arguments)
        except Exception as error:
            return type(error).__name__, str(error)
    return "", ""


def mistakes(world: World, folder: str) -> dict[str, tuple[str, str]]:
    """Return the errors of all mistakes, made one by one; the checkpointer keeps working in between."""
    here = Path(folder)
    found = {"keep": raised(Checkpointer, here / "a", 0)}
    found["unwritable"] = raised(Checkpointer, "/proc/self/task/x")
    checkpointer, model, _, own = make(world, str(here / "a"), seed=1)
    found["second"] = raised(Checkpointer, here / "a")
    found["none"] = raised(checkpointer.restore)
    found["step"] = raised(checkpointer.save, 3 + world.rank)
    found["one bad step"] = raised(checkpointer.save, 3 if world.rank == 0 else -3)
    own.state = {"rank": world.rank, "bad": {1} if world.rank == 1 else 1}
    found["unencodable"] = raised(checkpointer.save, 3)
    # An error here did not reach the other ranks, which then waited until the timeout.
    if world.rank == 1:
        model.state_dict = no_state
    found["no state"] = raised(checkpointer.save, 3)
    vars(model).pop("state_dict", None)
    own.state = {"rank": world.rank, "refuse": 1}
    checkpointer.save(3)
    found["one refuses"] = raised(checkpointer.restore)
    own.state = {"rank": 5}
    if world.rank == 1:
        checkpointer.register("more", Holder({}))
    found["names"] = raised(checkpointer.save, 4)
    found["names at restore"] = raised(checkpointer.restore)
    assert checkpointer.steps() == [3]
    assert checkpointer.latest() == here / "a" / "step-00000003"
    world.barrier()
    if world.is_main:
        shutil.rmtree(here / "a" / "step-00000003" / "rank-00001.safetensors", ignore_errors=True)
        (here / "a" / "step-00000003" / "rank-00001.safetensors").unlink()
    found["damaged"] = raised(checkpointer.restore)
    return found


def test_a_mistake_on_any_rank_raises_the_same_error_on_all(pools: Pools, tmp_path: Path) -> None:
    expected = {
        "keep": (UsageError, "keep must be"),
        "unwritable": (UsageError, "cannot be used: No such file"),
        "second": (UsageError, "another run is using"),
        "none": (NoCheckpoint, "there is no checkpoint in"),
        "step": (DesyncError, "saves step"),
        "one bad step": (UsageError, "not -3"),
        "no state": (CheckpointError, "step 3 was not saved: no state now"),
        "unencodable": (CheckpointError, "residual.state_dict()['bad'] is a builtins.set"),
        "one refuses": (CheckpointMismatch, "refused on rank 1"),
        "names": (UsageError, "has registered"),
        "names at restore": (CheckpointMismatch, "'more' is registered but not"),
        "damaged": (NoCheckpoint, "damaged: step-00000003"),
    }
    for rank, found in enumerate(pools.run(2, mistakes, str(tmp_path))):
        for name, (kind, message) in expected.items():
            assert found[name][0] == kind.__name__, (rank, name, found[name])
            assert message in found[name][1], (rank, name, found[name])
        assert found["one refuses"][1].removeprefix("rank 1: ") == "refused on rank 1"


def no_state() -> Any:
    raise RuntimeError("no state now")


def refusal_to_restore(world: World, folder: str) -> tuple[str, str]:
    return raised(make(world, folder, seed=1)[0].restore)


def test_per_rank_state_requires_the_same_world_size(pools: Pools, tmp_path: Path) -> None:
    pools.run(2, save, str(tmp_path))
    for kind, message in pools.run(3, refusal_to_restore, str(tmp_path)):
        assert kind == "CheckpointMismatch"
        assert "'residual' has a state per rank and was saved with world size 2, but this run has 3" in message


def refused_midway(world: World, folder: str, where: str, rank: int) -> tuple[str, str, bool]:
    torch.manual_seed(1)
    first, model = Holder({"epoch": 1, "shadow": torch.ones(2)}), nn.Linear(3, 2)
    wrapped = DistributedDataParallel(model, bucket_cap_mb=0.00001)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    last = Holder({"rank": world.rank, "epoch": 1})
    everything = {"first": first, "model": wrapped, "optimizer": optimizer, "last": last}

    def step() -> None:
        optimizer.zero_grad()
        wrapped(torch.rand(2, 3)).sum().backward()
        optimizer.step()

    with Checkpointer(folder) as checkpointer:
        for name, each in everything.items():
            checkpointer.register(name, each, per_rank=name == "last")
        step()
        checkpointer.save(1)
        step()
        first.state["epoch"] = last.state["epoch"] = 2
        first.state["shadow"] += 1
        optimizer.param_groups[0]["lr"] = 0.05
        if world.rank == rank:
            patched: Any = {"model": model, "optimizer": optimizer, "last": last}[where]
            patched.load_state_dict = refusing_once(patched.load_state_dict)
        states = {name: digest(each.state_dict()) for name, each in everything.items()}
        before, layout = (states, digest(rng_state())), wrapped.bucket_layout()
        failure = raised(checkpointer.restore)
        states = {name: digest(each.state_dict()) for name, each in everything.items()}
        same = (states, digest(rng_state())) == before and wrapped.bucket_layout() == layout
        step()  # training still works
        assert checkpointer.restore() == 1
    return (*failure, same)


def refusing_once(load: Callable[[Any], Any]) -> Callable[[Any], Any]:
    calls = []

    def refuse(state: Any) -> Any:
        load(state)
        calls.append(1)
        if len(calls) == 1:
            raise RuntimeError("half-way")

    return refuse


@pytest.mark.parametrize(("where", "rank"), [("model", 0), ("optimizer", 1), ("last", 1)])
def test_a_restore_that_fails_midway_is_rolled_back(pools: Pools, tmp_path: Path, where: str, rank: int) -> None:
    # The object that raised, and those before it, kept the checkpoint's state, so a run that continued without
    # resuming trained a mixture of both.
    for kind, message, same in pools.run(2, refused_midway, str(tmp_path), where, rank):
        assert (kind, same) == ("CheckpointMismatch", True)
        assert f"'{where}' cannot load its state of step 1 (RuntimeError: half-way)" in message


def malformed_for_rank_1(world: World, folder: str) -> tuple[str, str, bool]:
    model = nn.Linear(3, 2)
    with Checkpointer(folder) as checkpointer:
        checkpointer.register("model", model)
        checkpointer.register("own", Holder({"rank": world.rank}), per_rank=True)
        path = checkpointer.save(1)
        if world.is_main:
            forge_state(path, lambda state: state["ranks"][1]["own"].update(state={"tensor": "nowhere"}))
        world.barrier()
        nn.init.constant_(model.weight, 3.0)
        failure = raised(checkpointer.restore)
        return (*failure, bool((model.weight == 3.0).all()))


def test_state_malformed_on_one_rank_is_refused_before_loading(pools: Pools, tmp_path: Path) -> None:
    for kind, message, same in pools.run(2, malformed_for_rank_1, str(tmp_path)):
        assert (kind, same) == ("CheckpointError", True)
        assert "malformed" in message


class Adapted(nn.Module):
    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.adapter = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.adapter(x)


FINE_TUNING: dict[str, Callable[[nn.Sequential], object]] = {
    "unfreeze": lambda net: net[0].requires_grad_(True),
    "freeze": lambda net: net[1].requires_grad_(False),
    "append": lambda net: net.append(nn.Linear(4, 2)),
    "adapt": lambda net: net.__setitem__(1, Adapted(net[1])),
    "replace": lambda net: net.__setitem__(2, nn.Linear(4, 3)),
    "remove": lambda net: net.__delitem__(2),
}


def fine_tuned(world: World, folder: str, change: str, more: int) -> bool:
    """Change a wrapped module during training, save, and compare resumed with uninterrupted training."""

    def start(seed: int) -> tuple[Checkpointer, Any, Any, Any]:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
        net[0].requires_grad_(False)
        model = DistributedDataParallel(net, bucket_cap_mb=1e-4, unused_parameters="allow")
        torch.manual_seed(seed)  # new layers may differ between ranks until restored
        optimizer = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.1, momentum=0.9)
        checkpointer = opened(Path(folder), {"model": model, "optimizer": optimizer})

        def apply() -> None:
            FINE_TUNING[change](net)
            known = {id(p) for group in optimizer.param_groups for p in group["params"]}
            if new := [p for p in net.parameters() if p.requires_grad and id(p) not in known]:
                optimizer.add_param_group({"params": new, "lr": 0.05})

        def train(first: int, last: int) -> None:
            for step in range(first, last):
                inputs = torch.randn(2, 4, generator=torch.Generator().manual_seed(10 * step + world.rank))
                optimizer.zero_grad()
                model(inputs).square().mean().backward()
                optimizer.step()

        return checkpointer, model, apply, train

    checkpointer, whole, apply, train = start(seed=1)
    train(0, 2)
    apply()
    train(2, 2 + more)
    checkpointer.save(2 + more)
    train(2 + more, 7)
    checkpointer.close()
    checkpointer, model, apply, train = start(seed=2 + world.rank)
    apply()
    assert checkpointer.restore() == 2 + more
    checkpointer.close()
    train(2 + more, 7)
    return digest(model.state_dict()) == digest(whole.state_dict()) and model.bucket_layout() == whole.bucket_layout()


@pytest.mark.parametrize("change", FINE_TUNING)
@pytest.mark.parametrize(("ranks", "more"), [(1, 2), (2, 0), (3, 2)])
def test_a_changed_module_resumes_bit_equal(pools: Pools, tmp_path: Path, change: str, ranks: int, more: int) -> None:
    assert all(pools.run(ranks, fine_tuned, str(tmp_path), change, more))


def trained(world: World, folder: str, default: str) -> str:
    """Train for two steps, restore, train for two more, and return the digest of the weights."""
    data = TensorDataset(torch.arange(96.0).view(24, 4) / 96)
    for last in (2, 4):
        torch.manual_seed(last)
        net = nn.Linear(4, 3)
        with torch.device(default):
            model = DistributedDataParallel(net, check_replicas_every=1)
            optimizer = ShardedOptimizer(model, torch.optim.SGD, lr=0.1, momentum=0.9)
            loader = DataLoader(data, batch_size=4, shuffle=True, num_workers=1)
            objects = {"model": model, "optimizer": optimizer, "loader": loader}
            with opened(Path(folder), objects) as checkpointer:
                step = checkpointer.restore() if checkpointer.steps() else 0
                for (x,) in itertools.islice(loader, last - step):
                    model(x).sum().backward()
                    optimizer.step()
                    optimizer.zero_grad()
                checkpointer.save(last)
    return digest(net)


def test_another_default_device_changes_nothing(pools: Pools, tmp_path: Path) -> None:
    # torch.set_default_device("cuda") is common; "meta" stands in for a GPU.
    runs = [pools.run(2, trained, str(tmp_path / default), default) for default in ("cpu", "meta")]
    assert runs[0] == runs[1]


# -- local SGD ---------------------------------------------------------------------------------------------------------


def make_local(folder: str, seed: int) -> tuple[Checkpointer, DistributedDataParallel, Any, StepLR]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the import loads TorchScript
        from torch.distributed.optim import PostLocalSGDOptimizer
    torch.manual_seed(seed)
    model = DistributedDataParallel(nn.Linear(4, 3))
    inner = torch.optim.Adam(model.parameters(), lr=0.1)
    optimizer = PostLocalSGDOptimizer(inner, PeriodicModelAverager(period=3, warmup_steps=2))
    checkpointer, schedule = Checkpointer(folder), StepLR(optimizer, 2, 0.5)
    with pytest.raises(UsageError, match=r"PostLocalSGDOptimizer .*; register it and the model with per_rank=True"):
        checkpointer.register("optimizer", optimizer)
    for name, entry in {"model": model, "optimizer": optimizer, "schedule": schedule}.items():
        checkpointer.register(name, entry, per_rank=name != "schedule")
    return checkpointer, model, optimizer, schedule


def train_local(world: World, folder: str, first: int, last: int) -> torch.Tensor:
    """Restore step `first` unless it is 0, take local steps up to `last`, save it, and return this rank's weights."""
    checkpointer, model, optimizer, schedule = make_local(folder, seed=first)
    assert not first or checkpointer.restore() == first
    with checkpointer, model.local_steps():
        for number in range(first, last):
            optimizer.zero_grad()
            inputs = torch.randn(2, 4, generator=torch.Generator().manual_seed(100 * number + world.rank))
            model(inputs).square().mean().backward()
            optimizer.step()
            schedule.step()
            assert checkpointer.step() == number + 1, "a local step counts"
        checkpointer.save(last)
        return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])


def save_as_shared(_: World, folder: str) -> None:
    model = DistributedDataParallel(nn.Linear(4, 3))
    with Checkpointer(folder) as checkpointer, model.local_steps():
        checkpointer.register("model", model)
        with pytest.raises(UsageError, match=r"each rank has its own parameters.* register the model .* per_rank=True"):
            checkpointer.save(1)


def test_save_in_local_steps_needs_a_model_per_rank(pools: Pools, tmp_path: Path) -> None:
    pools.run(2, save_as_shared, str(tmp_path))


def test_post_local_sgd_resumes_exactly_at_any_step(pools: Pools, tmp_path: Path) -> None:
    """Registering the optimizer inside it lost the averager's step (pytorch/pytorch#74556)."""
    expected = pools.run(2, train_local, str(tmp_path / "whole"), 0, 8)
    assert not torch.equal(*expected)
    for stop in range(1, 8):
        folder = str(tmp_path / str(stop))
        pools.run(2, train_local, folder, 0, stop)
        assert all(map(torch.equal, pools.run(2, train_local, folder, stop, 8), expected))
