"""A plain loop that saves after each optimizer step can resume from any save with the bits of an uninterrupted run.

Epochs end with a short accumulation window, and the evaluation draws random numbers.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import paceline
from paceline.core.digests import weights_sha256
from paceline.core.world import World
from paceline.data import DataLoader
from paceline.train import Evaluation, evaluate
from trainings import digest, relative_difference
from twins import Pools

EPOCHS, WINDOWS = 2, 2  # 46 samples in batches of 8 are 6 micro-batches: a window of 4 and one of 2


def net(dropout: float) -> nn.Module:
    torch.manual_seed(0)
    norm = [nn.BatchNorm1d(8)] if dropout else []  # its statistics depend on the number of ranks
    return nn.Sequential(nn.Linear(4, 8), *norm, nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 3)).double()


def noisy_error(module: nn.Module, batch: Any) -> tuple[dict[str, Tensor], int]:
    x, y = batch
    return {"error": (module(x + 0.1 * torch.randn_like(x)) - y).square().sum()}, len(x)


def train(world: World, folder: str, dropout: float, resume_from: int | None = None) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1)
    x, y = (torch.randn(46, width, generator=generator, dtype=torch.float64) for width in (4, 3))
    model = paceline.DistributedDataParallel(net(dropout))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS * WINDOWS)
    loader = DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True)
    evaluation = Evaluation(DataLoader(TensorDataset(x[:9], y[:9]), batch_size=4), noisy_error, ("error",))
    torch.manual_seed(world.rank if resume_from is None else 99)
    metrics: dict[int, Any] = {}
    with paceline.Checkpointer(folder, keep=99) as checkpointer:
        for name, value in {"model": model, "optimizer": optimizer, "scheduler": scheduler, "loader": loader}.items():
            checkpointer.register(name, value)
        step = 0 if resume_from is None else checkpointer.restore(resume_from)
        for epoch in range(step // WINDOWS, EPOCHS):
            for x, y in paceline.accumulate(model, loader, every=4):
                with model.weight(len(x)):
                    (model(x) - y).square().sum().backward()
                if model.do_sync:
                    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                    optimizer.step()
                    optimizer.zero_grad()
                    scheduler.step()
                    step += 1
                    if resume_from is None:
                        checkpointer.save(step)
            metrics[epoch] = evaluate(model, evaluation)
    assert step == EPOCHS * WINDOWS
    return {
        "weights": {name: tensor.numpy().copy() for name, tensor in model.module.state_dict().items()},
        "bits": (weights_sha256(model), digest(optimizer.state_dict()), digest(paceline.core.rng.rng_state())),
        "metrics": metrics,
    }


def resume_from_every_save(world: World, folder: str) -> None:
    whole = train(world, folder, dropout=0.3)
    for step in range(1, EPOCHS * WINDOWS):
        resumed = train(world, folder, 0.3, step)
        assert resumed["bits"] == whole["bits"], f"from step {step}"
        assert resumed["metrics"] == {epoch: whole["metrics"][epoch] for epoch in resumed["metrics"]}


@pytest.mark.slow
def test_resuming_from_any_save_gives_the_same_bits(pools: Pools, tmp_path: Path) -> None:
    pools.run(3, resume_from_every_save, str(tmp_path))


def resume_from_other_saves(world: World, folder: str) -> list[Any]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*random generators")  # not restored on another number of ranks
        return [train(world, folder, 0.0, step) for step in range(1, EPOCHS * WINDOWS)]


@pytest.mark.slow
def test_resuming_from_any_save_works_with_another_number_of_ranks(pools: Pools, tmp_path: Path) -> None:
    [whole, _] = pools.run(2, train, str(tmp_path), 0.0)
    first, *others = pools.run(3, resume_from_other_saves, str(tmp_path))
    for index, resumed in enumerate(first):
        assert relative_difference(resumed["weights"], whole["weights"]) < 1e-9
        assert all(other[index]["bits"][:2] == resumed["bits"][:2] for other in others)
