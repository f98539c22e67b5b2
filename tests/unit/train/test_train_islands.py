"""The Trainer with LocalSGD and DiLoCo: resuming, stopping, evaluations, and unsupported options."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from insides import loop, weights_sha256
from paceline import World
from paceline.checkpoint import Checkpointer
from paceline.data import DataLoader
from paceline.ddp import DistributedDataParallel
from paceline.optim import DiLoCo, LocalSGD
from paceline.train import Evaluation, ExponentialMovingAverage, TrainConfig, Trainer, evaluate
from trainings import (
    LR,
    Interrupted,
    Points,
    Run,
    digest,
    interruption,
    net,
    refusal,
    scalers_made,
    squared_error,
    squared_loss,
)
from twins import Pools


def island(world: World, islands: int, memory: bool = False) -> DistributedDataParallel:
    mesh = init_device_mesh("cpu", (islands, world.size // islands), mesh_dim_names=("between", "inside"))
    return DistributedDataParallel(net(Run(TrainConfig(1), memory=memory)), device_mesh=mesh["inside"])


def optimizer_of(kind: str, model: Any, **options: Any) -> Any:
    inner = torch.optim.AdamW(model.parameters(), lr=LR)
    if kind == "LocalSGD":
        return LocalSGD(model, inner, 4, **options)
    outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    return DiLoCo(model, inner, outer, 6, fragments=2, delay=1, alpha=0.25, **options)


def trainer_of(model: Any, optimizer: Any, loss: Any = squared_loss, folder: Any = None, **options: Any) -> Trainer:
    data = Points(41, torch.float64)  # the last batch has one sample, so one island has no samples
    evaluation = Evaluation(DataLoader(data, 16), squared_error, ("error",))
    objects = {} if folder is None else {"checkpointer": Checkpointer(folder, every=1)}
    callbacks = options.pop("callbacks", [])
    config = TrainConfig(**{"max_steps": 10, "evaluate_every": 5, "log_every": 3, **options})
    loader = DataLoader(data, 8, shuffle=True, seed=3)
    return Trainer(model, optimizer, loss, loader, config, evaluation, callbacks=callbacks, **objects)


def resumed(world: World, islands: int, kind: str, folder: str) -> dict[int, tuple[Any, ...]]:
    """Train without a stop, and with a stop after some of the steps; return the final states."""
    outcomes = {}
    for stop in (0, 1, 5, 6, 9):
        for resume in (False, True) if stop else (False,):
            model = island(world, islands, memory=True)
            optimizer = optimizer_of(kind, model)
            trainer = trainer_of(model, optimizer, folder=f"{folder}/{stop}", resume=resume)
            if stop and not resume:
                optimizer.register_step_post_hook(interruption(stop))
            try:
                trainer.fit()
            except Interrupted:
                trainer._loop.checkpointer.close()
        outcomes[stop] = weights_sha256(model), digest(optimizer.state_dict()), trainer.result.metrics
    return outcomes


@pytest.mark.parametrize("kind", ["LocalSGD", "DiLoCo"])
@pytest.mark.parametrize(("ranks", "islands"), [(2, 2), (4, 2)])
def test_resume_in_a_round_continues_with_the_same_bits(
    pools: Pools, tmp_path: Path, ranks: int, islands: int, kind: str
) -> None:
    outcomes = pools.run(ranks, resumed, islands, kind, str(tmp_path))
    for outcome in outcomes:
        assert [stop for stop, bits in outcome.items() if bits != outcome[0]] == []
        assert outcome[0][0] == outcomes[0][0][0], "islands differ after the end"
        assert outcome[0][2] == outcomes[0][0][2], "ranks have different metrics"


class Watcher:
    """Records steps with their evaluations, and asks to stop on one rank."""

    def __init__(self, stops_at: int) -> None:
        self.stops_at = stops_at
        self.gathered: list[int] = []
        self.errors: list[tuple[float, float, bool]] = []

    def on_step(self, run: Any) -> None:
        self.gathered.append(loop.consensus.gather.call_count)
        if run.step == self.stops_at:
            run.stop()

    def on_evaluation(self, run: Any) -> None:
        data = Evaluation(DataLoader(Points(41, torch.float64), 16), squared_error, ("error",))
        with run.optimizer.outer_weights():
            self.errors.append((run.metrics["eval/error"], evaluate(run.model, data)["error"], run.optimizer.is_apart))


@pytest.mark.ranks(2)
def test_stop_by_one_rank_ends_all_ranks_after_the_same_exchange(world: World) -> None:
    model = island(world, world.size)
    watcher = Watcher(stops_at=5 if world.rank == 1 else 0)
    with patch.object(loop.consensus, "gather", wraps=loop.consensus.gather):
        trainer = trainer_of(model, optimizer_of("DiLoCo", model), callbacks=[watcher], evaluate_every=4)
        assert trainer.fit().steps == 6  # islands exchange after steps 3, 6, 9, …
    # After step 3, the evaluation of step 4, and step 6.
    assert [count - watcher.gathered[0] for count in watcher.gathered] == [0, 0, 1, 1, 2, 3]
    # Step 4 is evaluated in the middle of a round; step 6 is the end.
    assert [(ours == theirs, apart) for ours, theirs, apart in watcher.errors] == [(True, True), (True, False)]


@pytest.mark.ranks(2)
def test_gradscaler_of_one_island_skips_a_step_that_counts_on_all(world: World) -> None:
    def loss(model: Any, batch: Any) -> Any:
        total, count = squared_loss(model, batch)
        return total * (float("inf") if trainer.result.steps == 3 and world.rank == 1 else 1.0), count

    model = island(world, world.size)
    with scalers_made() as scalers:
        trainer = trainer_of(model, optimizer_of("LocalSGD", model), loss, precision="fp16")
    initial = scalers[0].get_scale()
    assert trainer.fit().steps == 10
    assert scalers[0].get_scale() == initial / (1 + world.rank)


@pytest.mark.ranks(2)
def test_unsupported_options_with_islands_are_refused(world: World, tmp_path: Path) -> None:
    model = island(world, world.size)
    whole = DistributedDataParallel(net(Run(TrainConfig(1))))
    average = ExponentialMovingAverage(model)
    messages = [
        refusal(trainer_of, whole, optimizer_of("LocalSGD", whole.module)),
        refusal(trainer_of, model, torch.optim.SGD(model.parameters())),
        refusal(trainer_of, model, optimizer_of("DiLoCo", model, on_lost_island="continue")),
        refusal(trainer_of, model, optimizer_of("DiLoCo", model), load_best_at_end=True),
        refusal(trainer_of, model, optimizer_of("DiLoCo", model), callbacks=[average]),
    ]
    expected = [
        f"the model averages over the ranks [0, 1], but its island in LocalSGD has the ranks [{world.rank}]; wrap",
        "the model averages over 1 ranks, but the Trainer splits data ",
        "the Trainer cannot train with DiLoCo and on_lost_island='continue', because ",
        "the Trainer cannot train with DiLoCo and load_best_at_end, because ",
        "ExponentialMovingAverage averages weights that differ ",
    ]
    for message, start in zip(messages, expected, strict=True):
        assert message.startswith(start)
