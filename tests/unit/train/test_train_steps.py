"""Training for a number of steps, evaluations in between, streams, the best checkpoint, and ReduceLROnPlateau."""

from __future__ import annotations

import json
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from insides import weights_sha256
from paceline import World
from paceline.data import DataLoader, GlobalBatchSampler, GlobalBatchStream
from paceline.ddp import DistributedDataParallel
from paceline.train import Evaluation, Result, TrainConfig, Trainer
from trainings import (
    LR,
    Points,
    Run,
    Settings,
    Stream,
    net,
    plain_loop,
    refusal,
    relative_difference,
    squared,
    squared_error,
    squared_loss,
    weights_of,
)
from twins import Pools

RUN = Run(TrainConfig(1), samples=45)
FALLING = {"warmup_steps": 2, "decay": "linear", "total_steps": 9}


@dataclass(frozen=True)
class Case:
    """A training of Points whose evaluations, if any, return `losses` in turn."""

    config: dict[str, Any]
    stream: str = ""
    """``"endless"``, ``"short"``, or empty for a map-style dataset."""
    losses: Sequence[float] = ()
    plateau: dict[str, Any] | None = None


@dataclass
class Outcome:
    result: Result
    weights: dict[str, Any]
    sha256: str
    rates: list[float]
    seen: list[list[int]]
    after: dict[int, str] = field(default_factory=dict)
    """Digest of the weights after each step."""
    saved: list[int] = field(default_factory=list)


def train(world: World, case: Case) -> Outcome:
    module = net(RUN)
    model = DistributedDataParallel(module)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)
    data = Points(RUN.samples, RUN.dtype)
    rates: list[float] = []
    seen: list[list[int]] = []
    after: dict[int, str] = {}
    saved: list[int] = []

    def loss(model: nn.Module, batch: Any) -> tuple[Tensor, float]:
        x, y, indices = batch
        seen.append(indices.tolist())
        return squared(model(x), y), len(x)

    def sums(module: nn.Module, batch: Any) -> tuple[dict[str, Tensor], int]:
        return {"loss": torch.tensor(case.losses[len(evaluated_at)] * len(batch[0]))}, len(batch[0])

    evaluated_at: list[int] = []

    def note(*_: Any) -> None:
        rates.append(optimizer.param_groups[0]["lr"])

    optimizer.register_step_post_hook(note)
    if case.stream:
        loader = DataLoader(GlobalBatchStream(Stream(data, case.stream == "endless"), RUN.batch_size))
    else:
        loader = DataLoader(data, RUN.batch_size)
    evaluation = Evaluation(DataLoader(data, 16), sums, ("loss",)) if case.losses else None
    scheduler = None if case.plateau is None else ReduceLROnPlateau(optimizer, **case.plateau)

    class Watch:
        def on_step(self, run: Any) -> None:
            after[run.step] = weights_sha256(model)

        def on_evaluation(self, run: Any) -> None:
            evaluated_at.append(run.step)

        def on_save(self, run: Any) -> None:
            saved.append(run.step)

    config = Settings(**case.config)
    objects = ({} if scheduler is None else {"scheduler": scheduler}) | config.objects(optimizer)
    trainer = Trainer(model, optimizer, loss, loader, config, evaluation, callbacks=[Watch()], **objects)
    trainer.fit()
    return Outcome(trainer.result, weights_of(module), weights_sha256(model), rates, seen, after, saved)


@pytest.mark.parametrize(("size", "stream"), [(1, ""), (2, "short")])
def test_max_steps_matches_a_plain_loop_over_the_needed_passes(pools: Pools, size: int, stream: str) -> None:
    in_order = list(GlobalBatchSampler(RUN.samples, RUN.batch_size, shuffle=False, rank=0, world_size=1))
    plain = weights_of(plain_loop(RUN, (3 * in_order)[:15]))
    for outcome in pools.run(size, train, Case({"max_steps": 15}, stream)):
        assert outcome.result.steps == 15
        # Two passes of 45 samples and three batches; the last batch of a stream's pass counts as full.
        assert outcome.result.samples == (2 * 45 if not stream else 2 * 48) + 3 * 8
        assert relative_difference(outcome.weights, plain) < 1e-9


def test_endless_stream_ends_after_max_steps(pools: Pools) -> None:
    case = Case({"max_steps": 9, "schedule": FALLING}, "endless")
    outcomes = pools.run(2, train, case)
    assert [len(outcome.seen) for outcome in outcomes] == [9, 9]
    assert outcomes[0].rates == pytest.approx([LR / 2, LR, *(LR * (9 - step) / 7 for step in range(2, 9))])


def test_evaluations_run_at_the_interval_and_after_the_last_step(pools: Pools, tmp_path: Path) -> None:
    file = tmp_path / "m"
    config = {"max_steps": 10, "evaluate_every": 4, "log_every": 3, "metrics_file": str(file)}
    pools.run(2, train, Case(config, losses=[3.0, 2.0, 1.0]))
    line, evaluation = ["lr", "train/loss"], ["eval/loss"]
    # An epoch has 6 steps and ends with a metrics line.
    expected = [(3, line), (4, evaluation), (6, line), (8, evaluation), (9, line), (10, line), (10, evaluation)]
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [(line["step"], sorted(line.keys() - {"step"})) for line in lines] == expected


BEST = {
    # metrics of steps 2, 4, 6, 8; the mode; the best step; the saved steps, and those kept with keep=1
    "the largest": ([4.0, 1.0, 5.0, 3.0], "max", 6, [2, 6, 8], [6, 8]),
    "NaN is never best": ([float("nan"), 2.0, float("nan"), 3.0], None, 4, [4, 8], [4, 8]),
}


def quiet_train(world: World, case: Case) -> Outcome:
    """Train without the warning that a checkpoint's metric is NaN."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return train(world, case)


@pytest.mark.parametrize(("losses", "best", "step", "saved", "kept"), BEST.values(), ids=BEST)
def test_best_evaluation_is_kept_and_its_weights_restored_at_the_end(
    pools: Pools, tmp_path: Path, losses: list[float], best: str | None, step: int, saved: list[int], kept: list[int]
) -> None:
    config = {"max_steps": 8, "evaluate_every": 2, "checkpoint_dir": str(tmp_path), "keep": 1, "checkpoint_every": 99}
    config |= {"keep_best": "loss", "best": best, "load_best_at_end": True, "async_save": True}
    for outcome in pools.run(2, quiet_train, Case(config, losses=losses)):
        assert outcome.result.best_step == step
        assert outcome.saved == saved
        assert outcome.result.metrics == {"loss": losses[step // 2 - 1]}
        assert outcome.sha256 == outcome.after[step]
    assert sorted(int(entry.name[5:]) for entry in tmp_path.glob("step-*")) == kept


@pytest.mark.parametrize(
    ("size", "options"), [(2, {"factor": 0.5, "patience": 1}), (1, {"mode": "max", "patience": 0, "cooldown": 1})]
)
def test_plateau_uses_the_same_rates_as_torch(pools: Pools, size: int, options: dict[str, Any]) -> None:
    losses = [5.0, 4.0, 4.5, 4.2, 4.1, 3.0, 3.5, 3.4, 3.3]
    parameter = nn.Parameter(torch.zeros(1))
    theirs = torch.optim.SGD([parameter], lr=LR)
    scheduler = ReduceLROnPlateau(theirs, **options)
    expected = []
    for loss in losses:
        expected += [theirs.param_groups[0]["lr"]] * 2
        scheduler.step(loss)
    config = {"max_steps": 18, "evaluate_every": 2}
    for outcome in pools.run(size, train, Case(config, losses=losses, plateau=options)):
        assert outcome.rates == expected
    assert len(set(expected)) > 2


def trainer(config: dict[str, Any], evaluates: bool, derives: bool, plateau: bool, stream: bool) -> Trainer:
    model = DistributedDataParallel(nn.Linear(6, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = Points(16, torch.float32)
    derive = (lambda means: {"perplexity": means["error"]}) if derives else None
    evaluation = Evaluation(DataLoader(data, 8), squared_error, ("error",), derive) if evaluates else None
    loader = DataLoader(GlobalBatchStream(Stream(data), 8)) if stream else DataLoader(data, 8)
    given = Settings(**{"epochs": 1, **config})
    objects: dict[str, Any] = {"scheduler": ReduceLROnPlateau(optimizer)} if plateau else {}
    return Trainer(model, optimizer, squared_loss, loader, given, evaluation, **objects, **given.objects(optimizer))


NEEDS = "needs checkpoints; give Trainer(…, checkpointer=Checkpointer(folder))"
SAVED: dict[str, Any] = {"checkpoint_dir": "-"}
BEST_ERROR = {**SAVED, "keep_best": "error"}
REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "load without checkpoints": ({"load_best_at_end": True}, "", f"load_best_at_end {NEEDS}"),
    "load without best": ({**SAVED, "load_best_at_end": True}, "", "load_best_at_end needs a metric; give Checkpoint"),
    "resume without checkpoints": ({"resume": True}, "", f"resume {NEEDS}"),
    "best without an evaluation": (BEST_ERROR, "alone", "keep_best is 'error', but the Trainer has no evaluation"),
    "best of an unknown metric": (
        {**SAVED, "keep_best": "acc"},
        "",
        "keep_best is 'acc', but the evaluation has 'error'",
    ),
    "best of a metric that is not derived": (BEST_ERROR, "derives", "keep_best is 'error', but the evaluation has"),
    "evaluate without an evaluation": ({"evaluate_every": 3}, "alone", "evaluate_every needs an evaluation; give Tra"),
    "plateau of an unknown metric": ({"monitor": "acc"}, "plateau", "monitor, which the ReduceLROnPlateau follows, is"),
    "a stream by epochs": ({}, "stream", "the length of a stream is unknown; give TrainConfig(max_steps=…) instead of"),
}


@pytest.mark.ranks(2)
def test_invalid_setups_are_one_line_on_every_rank(world: World, tmp_path: Path) -> None:
    for mistake, (config, what, beginning) in REFUSED.items():
        if "checkpoint_dir" in config:
            config = {**config, "checkpoint_dir": str(tmp_path / mistake)}
        parts = (what != "alone", what == "derives", what == "plateau", what == "stream")
        message = refusal(lambda: trainer(config, *parts).fit())  # noqa: B023
        assert message.startswith(beginning), mistake
        assert "\n" not in message
