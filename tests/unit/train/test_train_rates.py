"""Learning rates: as tables, and as used by the Trainer."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, ReduceLROnPlateau, StepLR

from paceline import World
from paceline.data import DataLoader, GlobalBatchSampler
from paceline.ddp import DistributedDataParallel
from paceline.train import Trainer, lr_factor, scaled_lr
from trainings import FEATURES, Points, Settings, refusal, squared_loss

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


@pytest.mark.ranks(1)
def test_resume_with_another_schedule_requires_permission(world: World, tmp_path: Path) -> None:
    said = []
    for steps, more in ((5, {}), (10, {"resume": True}), (10, {"resume": True, "allow_changed_settings": True})):
        model, optimizer = parts()
        schedule = {"warmup_steps": 2, "decay": "linear", "total_steps": steps}
        config = {"epochs": steps // 5, "checkpoint_dir": str(tmp_path), "schedule": schedule, **more}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about adopting the settings of this run
            said.append(refusal(trainer(model, optimizer, **config).fit))
    assert (said[0], said[2]) == ("", "")
    assert said[1].startswith("the checkpoint was written with schedule={'warmup_steps': 2, 'decay': 'linear'")


@pytest.mark.ranks(1)
def test_user_scheduler_is_stepped_and_saved_without_a_second_schedule(world: World, tmp_path: Path) -> None:
    # The scheduler was silently ignored.
    folder = str(tmp_path)
    model, optimizer = parts()
    used = rates_used(optimizer)
    scheduler = StepLR(optimizer, 2, 0.5)
    messages = [
        refusal(trainer, model, optimizer),
        refusal(trainer, model, optimizer, scheduler=ReduceLROnPlateau(optimizer)),
        refusal(trainer, model, optimizer, scheduler=StepLR(parts()[1], 2)),
    ]
    first = trainer(model, optimizer, scheduler=scheduler, checkpoint_dir=folder)
    first.fit()
    model, optimizer = parts()
    used_later = rates_used(optimizer)
    trainer(model, optimizer, scheduler=StepLR(optimizer, 2, 0.5), checkpoint_dir=folder, epochs=2, resume=True).fit()
    for make in (lambda it: StepLR(it, 3, gamma=0.5), lambda it: CosineAnnealingLR(it, 2)):
        model, optimizer = parts()
        changed = {"checkpoint_dir": folder, "epochs": 3, "resume": True, "allow_changed_settings": True}
        messages.append(refusal(trainer(model, optimizer, scheduler=make(optimizer), **changed).fit))
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


# -- learning rates as tables ------------------------------------------------------------------------------------------


SCALED = [
    # lr, rule, batch, base -> lr
    (0.1, "none", 256, 32, 0.1),
    (0.1, "linear", 256, 32, 0.8),
    (0.1, "linear", 16, 32, 0.05),
    (0.1, "sqrt", 128, 32, 0.2),
]


@pytest.mark.parametrize(("lr", "rule", "batch", "base", "expected"), SCALED)
def test_learning_rate_follows_the_global_batch_size(lr, rule, batch, base, expected) -> None:
    assert scaled_lr(lr, rule, batch, base) == pytest.approx(expected, rel=1e-12)


FACTORS = [
    # warm-up, decay, decay_steps, decay_to, total -> the factor of each step
    (6, "linear", None, 0.0, 4, [1 / 6, 2 / 6, 3 / 6, 4 / 6]),
    (2, "linear", None, 0.0, 6, [1 / 2, 1, 1, 3 / 4, 2 / 4, 1 / 4]),
    (2, "cosine", None, 0.0, 4, [1 / 2, 1, 1, 1 / 2]),
    (0, "linear", None, 0.5, 4, [1, 7 / 8, 6 / 8, 5 / 8]),
    (2, "wsd", 2, 0.0, 6, [1 / 2, 1, 1, 1, 1, 1 / 2]),
    (1, "wsd", 4, 0.5, 6, [1, 1, 1, 7 / 8, 6 / 8, 5 / 8]),
    (3, "wsd", 9, 0.0, 6, [1 / 3, 2 / 3, 1, 1, 2 / 3, 1 / 3]),  # at most the number of steps after the warm-up
    (0, "wsd", None, 0.0, 20, [1] * 19 + [1 / 2]),
    # A tenth is less than a step, so the decay is one step, whose factor is still 1.
    (0, "wsd", None, 0.0, 4, [1, 1, 1, 1]),
]


@pytest.mark.parametrize(("warmup", "decay", "decay_steps", "decay_to", "total", "expected"), FACTORS)
def test_factor_follows_the_decay_to_its_end(warmup, decay, decay_steps, decay_to, total, expected) -> None:
    factors = [lr_factor(step, warmup, decay, total, decay_steps, decay_to) for step in range(total)]
    assert factors == pytest.approx(expected, rel=1e-12)
    if warmup < total:
        assert lr_factor(total, warmup, decay, total, decay_steps, decay_to) == pytest.approx(decay_to)


def test_cosine_equals_torch() -> None:
    parameter = torch.zeros(1, requires_grad=True)
    optimizer = torch.optim.SGD([parameter], lr=2.0)
    theirs = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=9, eta_min=0.2)
    for step in range(9):
        assert 2.0 * lr_factor(step, 0, "cosine", 9, decay_to=0.1) == pytest.approx(theirs.get_last_lr()[0], rel=1e-9)
        optimizer.step()
        theirs.step()
