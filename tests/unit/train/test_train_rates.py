"""Learning rates used by the Trainer."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, ReduceLROnPlateau, StepLR

from paceline.core.world import World
from paceline.data import DataLoader, GlobalBatchSampler
from paceline.ddp import DistributedDataParallel
from paceline.train import Trainer
from trainings import FEATURES, Points, Settings, refusal, squared_loss
from twins import Pools

DATA = Points(40, torch.float32)


def parts(lr: float = 0.1) -> tuple[DistributedDataParallel, torch.optim.Optimizer]:
    model = DistributedDataParallel(nn.Linear(FEATURES, 3))
    return model, torch.optim.SGD(model.parameters(), lr=lr)


def trainer(model: Any, optimizer: Any, order: Any = None, **config: Any) -> Trainer:
    scheduler = {name: config.pop(name) for name in ("scheduler",) if name in config}
    if order is None:
        loader = DataLoader(DATA, 8)
    else:
        loader = DataLoader(DATA, batch_sampler=GlobalBatchSampler(DATA, 8, order=order))
    given = Settings(**{"epochs": 1, **config})
    return Trainer(model, optimizer, squared_loss, loader, given, **scheduler, **given.objects(optimizer))


def rates_used(optimizer: torch.optim.Optimizer) -> list[float]:
    used: list[float] = []
    optimizer.register_step_pre_hook(lambda *_: used.append(optimizer.param_groups[0]["lr"]))
    return used


def with_another_schedule(world: World, folder: str) -> list[str]:
    said = []
    for steps, more in ((5, {}), (10, {"resume": True}), (10, {"resume": True, "allow_changed_settings": True})):
        model, optimizer = parts()
        schedule = {"warmup_steps": 2, "decay": "linear", "total_steps": steps}
        config = {"epochs": steps // 5, "checkpoint_dir": folder, "schedule": schedule, **more}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about adopting the settings of this run
            said.append(refusal(trainer(model, optimizer, **config).fit))
    return said


def test_resume_with_another_schedule_requires_permission(pools: Pools, tmp_path: Path) -> None:
    [(first, other, allowed)] = pools.run(1, with_another_schedule, str(tmp_path))
    assert (first, allowed) == ("", "")
    assert other.startswith("the checkpoint was written with schedule={'warmup_steps': 2, 'decay': 'linear', 'total_st")


def with_a_scheduler(world: World, folder: str) -> list[Any]:
    model, optimizer = parts()
    used = rates_used(optimizer)
    scheduler = StepLR(optimizer, 2, gamma=0.5)
    messages = [
        refusal(trainer, model, optimizer),
        refusal(trainer, model, optimizer, scheduler=ReduceLROnPlateau(optimizer)),
        refusal(trainer, model, optimizer, scheduler=StepLR(parts()[1], 2)),
    ]
    first = trainer(model, optimizer, scheduler=scheduler, checkpoint_dir=folder)
    first.fit()
    model, optimizer = parts()
    used_later = rates_used(optimizer)
    trainer(
        model, optimizer, scheduler=StepLR(optimizer, 2, gamma=0.5), checkpoint_dir=folder, epochs=2, resume=True
    ).fit()
    for make in (lambda it: StepLR(it, 3, gamma=0.5), lambda it: CosineAnnealingLR(it, 2)):
        model, optimizer = parts()
        changed = {"checkpoint_dir": folder, "epochs": 3, "resume": True, "allow_changed_settings": True}
        messages.append(refusal(trainer(model, optimizer, scheduler=make(optimizer), **changed).fit))
    return [messages, used, used_later]


def test_user_scheduler_is_stepped_and_saved_without_a_second_schedule(pools: Pools, tmp_path: Path) -> None:
    # The scheduler was silently ignored.
    [(messages, used, used_later)] = pools.run(1, with_a_scheduler, str(tmp_path))
    beginnings = (
        "the optimizer has a learning-rate scheduler, which the Trainer would not step; give it as ",
        "monitor, which the ReduceLROnPlateau follows, is 'loss', but the Trainer has no evaluation; give Trainer(",
        "the scheduler belongs to a different optimizer; create it from the Trainer",
        "the checkpoint was written with scheduler={",
        "the checkpoint was written with scheduler={",
    )
    for message, beginning in zip(messages, beginnings, strict=True):
        assert message.startswith(beginning)
    assert used == pytest.approx([0.1, 0.1, 0.05, 0.05, 0.025])
    assert used_later == pytest.approx([0.025, 0.0125, 0.0125, 0.00625, 0.00625])
