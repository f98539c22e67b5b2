"""The Trainer with partly trained models: parameters outside the optimizer, or modules in eval mode."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paceline.core.world import World
from paceline.data import DataLoader
from paceline.ddp import DistributedDataParallel
from paceline.errors import CallbackError
from paceline.train import Evaluation, TrainConfig, Trainer
from trainings import LR, Points, Run, Settings, digest, net, squared, squared_error
from twins import Pools

RUN = Run(TrainConfig(1), samples=45)


class EndsAt:
    """Ends the training with an error after one step."""

    def __init__(self, step: int) -> None:
        self._step = step

    def on_step(self, run: Any) -> None:
        if run.step == self._step:
            raise ArithmeticError


def trainer(model: nn.Module, parameters: Any, callbacks: Any, **config: Any) -> Trainer:
    wrapped = DistributedDataParallel(model, virtual_ranks=config.get("virtual_ranks"))
    data = Points(RUN.samples, RUN.dtype)

    def loss(model: nn.Module, batch: Any) -> tuple[Tensor, float]:
        return squared(model(batch[0]), batch[1]) / 10, len(batch[0])

    evaluation = Evaluation(DataLoader(data, 16), squared_error, ("error",))
    loader = DataLoader(data, RUN.batch_size, shuffle=True, seed=RUN.seed)
    optimizer = torch.optim.SGD(parameters, lr=LR, momentum=0.9)
    given = Settings(**config)
    return Trainer(wrapped, optimizer, loss, loader, given, evaluation, callbacks=callbacks, **given.objects(optimizer))


def train_the_head(world: World, config: dict[str, Any], ends_at: int | None, is_frozen: bool) -> str:
    model = net(RUN)
    if is_frozen:
        model.requires_grad_(False)
        model[5].requires_grad_(True)
    for resume in (False, True) if ends_at else (False,):
        callback = EndsAt(-1 if resume or ends_at is None else ends_at)
        with suppress(CallbackError):
            trainer(model, model[5].parameters(), [callback], resume=resume, **config).fit()
    return digest([model.state_dict()])


@pytest.mark.parametrize(("precision", "ends_at", "slices"), [("fp32", 4, None), ("fp16", None, 4)])
def test_gradients_outside_the_optimizer_have_no_effect(
    pools: Pools, tmp_path: Path, precision: str, ends_at: int | None, slices: int | None
) -> None:
    # They accumulated over the whole run and counted in the norm, so a resume changed the bits; fp16 had scaled them.
    config = {"max_steps": 7, "clip_norm": 0.05, "precision": precision, "checkpoint_every": 1, "virtual_ranks": slices}
    left_out = pools.run(2, train_the_head, {**config, "checkpoint_dir": str(tmp_path / "1")}, ends_at, False)
    frozen = pools.run(2, train_the_head, {**config, "checkpoint_dir": str(tmp_path / "2")}, None, True)
    assert {*left_out} == {*frozen}


class Freezes:
    """Puts a module into eval mode, and records its mode."""

    def __init__(self) -> None:
        self.modes: set[tuple[bool, bool]] = set()

    def on_start(self, run: Any) -> None:
        run.model.module[0].eval()

    def on_step(self, run: Any) -> None:
        self.modes.add((run.model.module.training, run.model.module[0].training))


@pytest.mark.ranks(1)
def test_module_put_into_eval_mode_by_a_callback_stays_there(world: World) -> None:
    # fit() switched the whole model to training mode after on_start, which silently unfroze BatchNorm.
    model, callback = net(RUN), Freezes()
    model.eval()  # as models come from a hub
    trainer(model, model.parameters(), [callback], epochs=2).fit()
    assert callback.modes == {(True, False)}
