"""A saved optimizer that differs from this run's is refused by name; its state is restored in its own dtype.

torch's ``load_state_dict`` only compares counts. It silently replaced a changed momentum, accepted Adam's state for SGD
(a ``KeyError`` in ``step()``), and mixed up the state of parameter groups.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from test_checkpoint_roundtrip import Holder, opened, same
from torch import nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import CyclicLR, LambdaLR, OneCycleLR, ReduceLROnPlateau, SequentialLR, StepLR

from paceline.checkpoint import Checkpointer, CheckpointWarning
from paceline.errors import CheckpointMismatch
from paceline.optim import ShardedOptimizer

Make = Callable[[nn.Module], Optimizer]


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))


def groups(order: tuple[int, ...] = (0, 1), reverse: bool = False, **options: Any) -> Make:
    def make(model: nn.Module) -> Optimizer:
        parts = [list(model[index].parameters())[:: -1 if reverse else 1] for index in order]  # type: ignore[index]
        return SGD([{"params": part, **options} for part in parts], lr=0.1, momentum=0.9)

    return make


def step(model: nn.Module, optimizer: Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.ones(2, 3)).square().sum().backward()
    optimizer.step()


def save(folder: Path, make: Make) -> None:
    optimizer = make(model := net())
    with opened(folder, {"model": model, "optimizer": optimizer}) as checkpointer:
        step(model, optimizer)
        checkpointer.save(4)


def restored(folder: Path, make: Make, allow: bool = False) -> tuple[nn.Module, Optimizer]:
    optimizer = make(model := net())
    with opened(folder, {"model": model, "optimizer": optimizer}) as checkpointer:
        checkpointer.restore(allow_changed_settings=allow)
    return model, optimizer


RATE, HALF = torch.tensor(0.5), torch.tensor(0.25)


def sgd(**options: Any) -> Make:
    return lambda model: SGD(model.parameters(), **{"lr": 0.1, "momentum": 0.9, **options})


def adam(kind: Any = Adam, **options: Any) -> Make:
    return lambda model: kind(model.parameters(), **{"lr": 0.1, **options})


OTHERS: dict[str, tuple[Make, Make, str]] = {
    "class": (adam(), adam(AdamW, weight_decay=0), "is of class AdamW in this run but of class Adam in the checkpoint"),
    "groups swapped": (
        groups(),
        groups((1, 0)),
        "parameter 0 of group 0 of 'optimizer' is 'model.1.weight' in this run",
    ),
    "fewer parameters": (
        sgd(),
        lambda model: SGD(list(model.parameters())[:3]),
        r"groups of \[4\] parameters .* \[3\]",
    ),
    "parameters swapped": (groups(), groups(reverse=True), "is 'model.0.bias' in this run but 'model.0.weight' in the"),
}


@pytest.mark.parametrize(("before", "now", "message"), OTHERS.values(), ids=OTHERS)
def test_a_different_optimizer_is_refused_by_name(tmp_path: Path, before: Make, now: Make, message: str) -> None:
    save(tmp_path, before)
    for allow in (False, True):
        with pytest.raises(CheckpointMismatch, match=message):
            restored(tmp_path, now, allow)


def test_only_optimizers_have_their_settings_compared(tmp_path: Path) -> None:
    # With changed settings allowed, any other object that loaded an optimizer's state raised an AttributeError.
    save(tmp_path, sgd())
    for model, error in ((sgd()(net()), "'model' is an optimizer in this run, but not in the"), (net(), "")):
        checkpointer = opened(tmp_path, {"model": model, "optimizer": Holder({})})
        with checkpointer, pytest.raises(CheckpointMismatch, match=error) if error else nullcontext():
            assert checkpointer.restore(allow_changed_settings=True) == 4


def other_decay_in_group_1(model: nn.Module) -> Optimizer:
    optimizer = groups(weight_decay=0)(model)
    optimizer.param_groups[1]["weight_decay"] = 0.3
    return optimizer


CHANGES: dict[str, tuple[Make, Make, str]] = {
    "momentum": (sgd(), sgd(momentum=0.5), "momentum of group 0 of 'optimizer' is 0.5 in this run and 0.9"),
    "lr": (sgd(), sgd(lr=0.2), "lr of group 0 of 'optimizer' is 0.2 in this run and 0.1"),
    "lr as a tensor": (adam(lr=RATE, foreach=False), adam(lr=HALF, foreach=False), "is 0.25 in"),
    "betas": (adam(), adam(betas=(0.8, 0.9)), r"betas of group 0 of 'optimizer' is \(0.8, 0.9\) in this run and"),
    "one of the groups": (
        groups(weight_decay=0),
        other_decay_in_group_1,
        "weight_decay of group 1 of 'optimizer' is 0.3 in this run and 0",
    ),
}


@pytest.mark.parametrize(("before", "now", "message"), CHANGES.values(), ids=CHANGES)
def test_a_changed_setting_is_refused_or_kept_with_a_warning(
    tmp_path: Path, before: Make, now: Make, message: str
) -> None:
    save(tmp_path, before)
    fresh = now(net()).state_dict()["param_groups"]
    with pytest.raises(CheckpointMismatch, match=f"{message}.*in the checkpoint of step 4; give the saved value"):
        restored(tmp_path, now)
    with pytest.warns(CheckpointWarning, match=f"this run's settings are kept: .*{message}"):
        model, optimizer = restored(tmp_path, now, allow=True)
    assert same(optimizer.state_dict()["param_groups"], fresh)
    assert len(optimizer.state) == 4
    step(model, optimizer)


SCHEDULES: dict[str, Any] = {
    "step": lambda optimizer: StepLR(optimizer, 2, 0.5),
    "lambda": lambda optimizer: LambdaLR(optimizer, lambda step: (step + 1) / 10),
    "one cycle": lambda optimizer: OneCycleLR(optimizer, 0.2, 12),
    "in turn": lambda optimizer: SequentialLR(
        optimizer, [LambdaLR(optimizer, lambda step: (step + 1) / 3), StepLR(optimizer, 2, 0.5)], [3]
    ),
}


@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
def test_values_changed_by_a_schedule_do_not_count_as_changed_settings(tmp_path: Path, schedule: Any) -> None:
    # OneCycleLR and CyclicLR also change momentum; the weight decay schedule is user code.
    def run(steps: int, resume: bool, folder: Path = tmp_path / "cut") -> list[Any]:
        model = net()
        optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
        scheduler = schedule(optimizer)
        seen = []
        objects = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
        with opened(folder, objects) as checkpointer, warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            if resume:
                checkpointer.restore()
            for _ in range(steps):
                step(model, optimizer)
                scheduler.step()
                optimizer.param_groups[0]["weight_decay"] *= 0.9
                seen.append({key: value for key, value in optimizer.param_groups[0].items() if key != "params"})
                seen[-1] = copy.deepcopy(seen[-1])
            checkpointer.save(steps)
        return [*seen, copy.deepcopy(model.state_dict())]

    run(4, resume=False)
    ahead = run(3, resume=True)
    assert same(run(7, resume=False, folder=tmp_path / "whole")[4:], ahead)


@pytest.mark.parametrize("name", ["step", "in turn"])
def test_an_adopted_learning_rate_still_follows_its_schedule(tmp_path: Path, name: str) -> None:
    rates: dict[tuple[float, ...], list[float]] = {}
    for lrs in ((0.1,), (0.2,), (0.1, 0.2)):
        rates[lrs] = []
        for lr in lrs:
            model = net()
            optimizer = SGD(model.parameters(), lr=lr)
            scheduler = SCHEDULES[name](optimizer)
            objects = {"optimizer": optimizer, "scheduler": scheduler}
            with opened(tmp_path / str(lrs), objects) as checkpointer, warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)
                if checkpointer.steps():
                    checkpointer.restore(allow_changed_settings=True)
                for _ in range(4 if len(lrs) == 2 else 8):
                    rates[lrs].append(optimizer.param_groups[0]["lr"])
                    optimizer.step()
                    scheduler.step()
                checkpointer.save(4)
    assert rates[(0.1, 0.2)] == pytest.approx(rates[(0.1,)][:4] + rates[(0.2,)][4:])


def test_state_is_restored_in_its_own_dtype(tmp_path: Path) -> None:
    # torch's own load_state_dict casts the fp32 master copy of a bf16 parameter to bf16, so resuming loses
    # accumulated small steps.
    def make(value: float) -> Optimizer:
        parameter = nn.Parameter(torch.full((3,), value, dtype=torch.bfloat16))
        optimizer = SGD([parameter], lr=0.1)
        history = [torch.full((2,), value, dtype=torch.float64)]
        optimizer.state[parameter] = {"master": torch.full((3,), value), "nested": {"history": history}}
        return optimizer

    with opened(tmp_path, {"optimizer": make(1 / 3)}) as checkpointer:
        checkpointer.save(1)
    optimizer = make(0.0)
    with opened(tmp_path, {"optimizer": optimizer}) as checkpointer:
        checkpointer.restore()
    assert same(optimizer.state_dict()["state"], make(1 / 3).state_dict()["state"])


@pytest.mark.parametrize("kind", ["plain", "sharded"])
@pytest.mark.parametrize("is_late", [False, True])
def test_a_group_added_later_is_compared_by_initial_settings(tmp_path: Path, kind: str, is_late: bool) -> None:
    # It was compared by its settings at the time of the save, which a schedule had changed.
    def open_with(lr: float | None) -> tuple[Any, Optimizer, Checkpointer]:
        model = net()
        optimizer: Any = ShardedOptimizer(model[1], SGD, lr=0.1) if kind == "sharded" else sgd()(model[1])
        group = {"params": list(model[0].parameters()), "lr": lr}
        if lr is not None and not is_late:
            optimizer.add_param_group(group)
        checkpointer = opened(tmp_path, {"model": model, "optimizer": optimizer})
        if lr is not None and is_late:
            optimizer.add_param_group(group)
        return model, optimizer, checkpointer

    model, optimizer, checkpointer = open_with(None)
    with checkpointer:
        step(model, optimizer)
        if kind == "plain":  # a removed group does not count
            optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))], "lr": 0.3})
            del optimizer.param_groups[-1]
        optimizer.add_param_group({"params": list(model[0].parameters()), "lr": 0.01})
        for group in optimizer.param_groups:
            group["lr"] *= 0.5
        step(model, optimizer)
        checkpointer.save(2)
    for lr, allow, expected in ((0.01, False, 0.005), (0.01, True, 0.005), (0.02, True, 0.01)):
        _, optimizer, checkpointer = open_with(lr)
        message_part = f"lr of group 1 of 'optimizer' is {lr} in this run and 0.01"
        with checkpointer, nullcontext() if lr == 0.01 else pytest.warns(CheckpointWarning, match=message_part):
            checkpointer.restore(allow_changed_settings=allow)
        assert [group["lr"] for group in optimizer.param_groups] == [0.05, expected]
    with open_with(0.02)[2] as checkpointer, pytest.raises(CheckpointMismatch, match=message_part):
        checkpointer.restore()


class Halving:
    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer

    def step(self) -> None:
        self.optimizer.param_groups[0]["lr"] *= 0.5

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


LATE: dict[str, tuple[Make, Any, int, str]] = {
    "one cycle": (adam(), lambda optimizer: OneCycleLR(optimizer, 0.2, 12), 2, "betas"),
    "cyclic": (sgd(), lambda optimizer: CyclicLR(optimizer, 0.01, 0.1, 4), 2, "momentum"),
    "plateau": (adam(), lambda optimizer: ReduceLROnPlateau(optimizer, patience=0), 2, "lr"),
    "plateau, without a state": (sgd(momentum=0), lambda optimizer: ReduceLROnPlateau(optimizer, patience=0), 2, "lr"),
    "by hand, without a state": (sgd(momentum=0), Halving, 4, "lr"),
    "rate in a tensor": (
        lambda model: Adam(model.parameters(), lr=torch.tensor(0.1)),
        lambda optimizer: ReduceLROnPlateau(optimizer, patience=0),
        2,
        "lr",
    ),
    "known rates": (sgd(), lambda optimizer: StepLR(optimizer, 2, 0.5), 2, ""),
    "unchanged": (adam(Adagrad), lambda optimizer: StepLR(optimizer, 2, 0.5), 0, ""),
}


@pytest.mark.parametrize("allow", [False, True])
@pytest.mark.parametrize(("make", "schedule", "registered_at", "forgotten"), LATE.values(), ids=LATE)
def test_settings_changed_before_registration_are_named_and_restored(
    tmp_path: Path, make: Make, schedule: Any, registered_at: int, forgotten: str, allow: bool
) -> None:
    # The save gave no warning, and the restore refused the changed betas, momentum or rate.
    def train(model: nn.Module, optimizer: Optimizer, scheduler: Any, steps: int) -> None:
        for _ in range(steps):
            step(model, optimizer)
            scheduler.step(*([1.0] if isinstance(scheduler, ReduceLROnPlateau) else []))
            optimizer.zero_grad()

    def registered(parts: tuple[Any, ...]) -> Checkpointer:
        return opened(tmp_path, dict(zip(("model", "optimizer", "scheduler"), parts, strict=True)))

    def started() -> tuple[Any, ...]:
        optimizer = make(model := net())
        return model, optimizer, schedule(optimizer)

    parts = started()
    train(*parts, registered_at)
    message_part = f"'optimizer' was trained before it was registered, and its {forgotten} may have changed"
    with pytest.warns(CheckpointWarning, match=message_part) if forgotten else nullcontext():
        checkpointer = registered(parts)
        train(*parts, 4 - registered_at)
        checkpointer.save(4)
    checkpointer.close()
    with registered(resumed := started()) as checkpointer:
        checkpointer.restore(allow_changed_settings=allow)
    for each in (parts, resumed):
        train(*each, 2)
    assert same(parts[0].state_dict(), resumed[0].state_dict())
    assert same(parts[1].state_dict(), resumed[1].state_dict())
