"""Whose learning rates the Trainer uses, and how long they may fall."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR, ReduceLROnPlateau, StepLR

from paceline.core.processes.world import World
from paceline.data import DataLoader, GlobalBatchSampler
from paceline.ddp import DistributedDataParallel
from paceline.errors import PacelineError
from paceline.train import TrainConfig, Trainer
from trainings import FEATURES, Points, squared
from twins import Pools

DATA = Points(40, torch.float32)


def loss(model: nn.Module, batch: Any) -> tuple[Tensor, float]:
    x, y, _ = batch
    return squared(model(x), y), len(x)


def parts(lr: float = 0.1) -> tuple[DistributedDataParallel, torch.optim.Optimizer]:
    model = DistributedDataParallel(nn.Linear(FEATURES, 3))
    return model, torch.optim.SGD(model.parameters(), lr=lr)


def trainer(model: Any, optimizer: Any, order: Any = None, scheduler: Any = None, **config: Any) -> Trainer:
    if order is None:
        loader = DataLoader(DATA, 8)
    else:
        loader = DataLoader(DATA, batch_sampler=GlobalBatchSampler(DATA, 8, order=order))
    given = TrainConfig(**{"epochs": 1, "show_progress": False, **config})
    return Trainer(model, optimizer, loss, loader, given, scheduler=scheduler)


def refusal(function: Any, *arguments: Any, **options: Any) -> str:
    try:
        function(*arguments, **options)
    except PacelineError as error:
        return str(error)
    return ""


def rates_used(optimizer: torch.optim.Optimizer) -> list[float]:
    used: list[float] = []
    optimizer.register_step_pre_hook(lambda *_: used.append(optimizer.param_groups[0]["lr"]))
    return used


def one_after_another(world: World) -> list[list[float]]:
    model, optimizer = parts(0.1)
    used = rates_used(optimizer)
    trainer(model, optimizer, warmup_steps=5).fit()
    optimizer.param_groups[0]["lr"] = 0.01
    trainer(model, optimizer, warmup_steps=2).fit()
    optimizer.param_groups[0]["lr"] = 0.001
    optimizer.register_step_post_hook(lambda *_: optimizer.param_groups[0].update(lr=0.5))
    trainer(model, optimizer).fit()
    return [used[:5], used[5:10], used[10:]]


def test_a_second_trainer_starts_from_the_current_rate_and_none_is_overridden_without_a_schedule(pools: Pools) -> None:
    # torch's schedulers start from the initial_lr that the first one left.
    [(first, second, third)] = pools.run(1, one_after_another)
    assert first == pytest.approx([0.02, 0.04, 0.06, 0.08, 0.1])
    assert second == pytest.approx([0.005, 0.01, 0.01, 0.01, 0.01])
    assert third == pytest.approx([0.001, 0.5, 0.5, 0.5, 0.5])


def with_a_scheduler(world: World, folder: str) -> list[Any]:
    model, optimizer = parts()
    used = rates_used(optimizer)
    scheduler = StepLR(optimizer, 2, gamma=0.5)
    messages = [
        refusal(trainer, model, optimizer),
        refusal(trainer, model, optimizer, scheduler=scheduler, warmup_steps=2),
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


def test_a_users_scheduler_is_stepped_saved_and_the_only_one(pools: Pools, tmp_path: Path) -> None:
    # It had no effect, without a word.
    [(messages, used, used_later)] = pools.run(1, with_a_scheduler, str(tmp_path))
    beginnings = (
        "a learning-rate scheduler was made for the optimizer, which the Trainer does not step; give it as ",
        "the Trainer was given a scheduler and, by warmup_steps, decay or lr_scaling, a schedule of its own",
        "monitor, which the ReduceLROnPlateau follows, is 'loss', but there is no evaluation; give Trainer(",
        "the scheduler is of another optimizer than the Trainer's",
        "the checkpoint was written with scheduler={",
        "the checkpoint was written with scheduler={",
    )
    for message, beginning in zip(messages, beginnings, strict=True):
        assert message.startswith(beginning)
    assert used == pytest.approx([0.1, 0.1, 0.05, 0.05, 0.025])
    assert used_later == pytest.approx([0.025, 0.0125, 0.0125, 0.00625, 0.00625])


def growing(epoch: int) -> list[int]:
    return list(range(8 * (epoch + 1)))


def with_orders(world: World) -> list[Any]:
    model, optimizer = parts()
    used = rates_used(optimizer)
    result = trainer(model, optimizer, growing, epochs=3, decay="linear").fit()
    decayed = list(used), result.samples, result.steps
    model, optimizer = parts()
    twice = trainer(model, optimizer, [0, 0, 1] * 6, epochs=2, accumulate=2).fit().samples
    lengths = iter([8, 8, 8, 16])
    model, optimizer = parts()
    fickle = trainer(model, optimizer, lambda _: list(range(next(lengths))), epochs=2, decay="linear")
    return [decayed, twice, refusal(fickle.fit)]


def test_what_an_order_gives_is_counted_and_the_rate_falls_to_the_last_of_its_steps(pools: Pools) -> None:
    # Samples were those of the data set; with epochs of 1, 2 and 3 batches the rate was 0 from the fourth step on.
    [((used, samples, steps), twice, fickle)] = pools.run(1, with_orders)
    assert (samples, steps, twice) == (8 + 16 + 24, 6, 36)
    assert used == pytest.approx([0.1 * left / 6 for left in (6, 5, 4, 3, 2, 1)])
    assert fickle.startswith("the order of epoch 1 has 2 batches now but had 1 when the Trainer asked how long")
