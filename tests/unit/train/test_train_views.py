"""A Trainer with a schedule-free optimizer: steps train one view of the weights, and everything else sees the other."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import paceline
from paceline.checkpoint import Checkpointer
from paceline.core.processes.world import World
from paceline.data import DataLoader
from paceline.train import Evaluation, TrainConfig, Trainer
from processes import paceline as command
from processes import script
from schedule_free import ScheduleFree
from twins import Pools

Batch = tuple[Tensor, Tensor]


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(96, 8, generator=generator), torch.randint(0, 3, (96,), generator=generator))


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))


def loss(model: nn.Module, batch: Batch) -> tuple[Tensor, int]:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="sum"), len(batch[1])


def sums(model: nn.Module, batch: Batch) -> tuple[dict[str, Tensor], int]:
    total, count = loss(model, batch)
    return {"loss": total}, count


def plain_loop(every: int) -> tuple[list[float], nn.Module]:
    """Train in one process as the optimizer's authors do; return the losses of evaluations, and the module."""
    module, (inputs, targets), losses = net(), data().tensors, []
    optimizer = ScheduleFree(module.parameters())
    for step, (x, y) in enumerate(zip(inputs.split(16), targets.split(16), strict=True), 1):
        optimizer.train()
        for part in range(2):  # accumulated
            (F.cross_entropy(module(x[part::2]), y[part::2]) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % every == 0:
            optimizer.eval()
            losses.append(F.cross_entropy(module(inputs), targets).item())
    optimizer.eval()
    return losses, module


class Watch:
    """Notes what a callback sees of the weights."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_evaluation(self, run: Any) -> None:
        inputs, targets = data().tensors
        with torch.no_grad():
            self.seen.append(F.cross_entropy(paceline.unwrap(run.model)(inputs), targets).item())

    on_save = on_evaluation


def trained(
    world: World, folder: Path | None = None, steps: int = 6, every: int | None = None
) -> tuple[list[float], list[float], list[Tensor]]:
    """Train; return the losses of evaluations, of what callbacks and predictions see, and the weights at the end."""
    model = paceline.DistributedDataParallel(net())
    optimizer: Any = ScheduleFree(model.parameters())
    is_resume = folder is not None and folder.exists()
    config = TrainConfig(max_steps=steps, evaluate_every=every, accumulate=2, resume=is_resume)
    evaluation = Evaluation(DataLoader(data(), batch_size=32), sums, names=("loss",)) if every else None
    saver = None if folder is None else Checkpointer(folder, every=2)
    watch, losses = Watch(), []
    trainer = Trainer(
        model,
        optimizer,
        loss,
        DataLoader(data(), batch_size=8),
        config,
        evaluation,
        callbacks=[watch],
        checkpointer=saver,
        loggers=[Losses(losses)],
    )
    trainer.fit()
    predicted = trainer.predict(DataLoader(data(), batch_size=32))
    watch.seen.append(F.cross_entropy(predicted, data().tensors[1]).item())
    return losses, watch.seen, [each.detach() for each in model.parameters()]


class Losses:
    """A logger that keeps the losses of evaluations; it writes on rank 0."""

    def __init__(self, losses: list[float]) -> None:
        self._losses = losses

    def write(self, step: int, values: Any) -> None:
        if "eval/loss" in values:
            self._losses.append(values["eval/loss"])


def test_everything_but_steps_sees_the_weights_of_eval(pools: Pools, tmp_path: Path) -> None:
    expected, module = plain_loop(every=2)
    losses, seen, weights = pools.run(2, partial(trained, every=2), tmp_path / "run")[0]
    assert losses == pytest.approx(expected, rel=1e-5)
    assert seen == pytest.approx([*(each for each in expected for _ in range(2)), expected[-1]], rel=1e-5)
    torch.testing.assert_close(weights, list(module.parameters()))
    saved = net()
    paceline.load_weights(tmp_path / "run", saved)
    assert all(map(torch.equal, saved.parameters(), weights))


def test_evaluations_saves_and_a_resume_leave_the_bits_of_the_training(pools: Pools, tmp_path: Path) -> None:
    whole = pools.run(2, trained)[0][2]
    pools.run(2, partial(trained, steps=3), tmp_path / "run")
    resumed = pools.run(2, partial(trained, every=1), tmp_path / "run")[0][2]
    assert all(map(torch.equal, resumed, whole))


KILLED = f"""
import os, sys
sys.path[:0] = [{str(Path(__file__).parents[2])!r}, {str(Path(__file__).parent)!r}]
import paceline, torch
import test_train_views as views

world, plain, calls = paceline.init(), views.loss, []

def loss(model, batch):
    calls.append(batch)
    is_first_start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
    if len(calls) == 5 and world.rank == 1 and is_first_start:  # in step 3
        os.kill(os.getpid(), 9)
    return plain(model, batch)

views.loss = loss
torch.save(views.trained(world, every=2)[2], "weights")
"""


@pytest.mark.slow
def test_a_rank_that_is_killed_after_an_evaluation_costs_no_step(pools: Pools, tmp_path: Path) -> None:
    done = command(tmp_path, "run", "--nproc", "2", "--max-restarts", "1", script(tmp_path, KILLED), fork="all")
    assert done.returncode == 0, done.stderr
    assert "starting all ranks again from step 2, which is in memory" in done.stderr
    assert all(map(torch.equal, torch.load(tmp_path / "weights"), pools.run(2, trained)[0][2]))
