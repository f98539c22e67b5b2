"""The Trainer compared with a plain PyTorch loop, the files it writes, and partly trained models."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paceline import World
from paceline.checkpoint import Checkpointer
from paceline.data import DataLoader, GlobalBatchSampler
from paceline.ddp import DistributedDataParallel
from paceline.errors import CallbackError
from paceline.train import Evaluation, TrainConfig, Trainer
from trainings import (
    LR,
    Points,
    Run,
    Settings,
    digest,
    net,
    plain_loop,
    relative_difference,
    squared,
    squared_error,
    train,
    weights_of,
)
from twins import Pools


def batches_of(run: Run) -> list[list[int]]:
    """Return the samples of each step over all ranks."""
    size = run.batch_size * run.config.accumulate
    sampler = GlobalBatchSampler(run.samples, size, seed=run.seed, rank=0, world_size=1)
    return [batch for _ in range(run.config.epochs) for batch in list(sampler)]


@pytest.mark.parametrize(("size", "accumulate"), [(2, 2), (3, 1)])
def test_clipping_accumulation_and_schedule_match_a_plain_loop(pools: Pools, size: int, accumulate: int) -> None:
    steps = 3 * -(-45 // (8 * accumulate))
    config = Settings(3, accumulate=accumulate, clip_norm=0.7)
    schedule = {"warmup_steps": 2, "decay": "linear", "total_steps": steps}
    batches = batches_of(Run(config))
    rates = [1 / 2, 1, *((steps - step) / (steps - 2) for step in range(2, steps))]
    plain, unclipped = (weights_of(plain_loop(Run(config), batches, clip, rates.__getitem__)) for clip in (0.7, None))
    assert relative_difference(unclipped, plain) > 1e-3, "clipping to 0.7 has no effect"
    for outcome in pools.run(size, train, Run(replace(config, schedule=schedule))):
        assert outcome.result.steps == steps
        assert outcome.result.samples == 3 * 45
        assert relative_difference(outcome.weights, plain) < 1e-9


def test_more_ranks_than_samples_match_a_plain_loop(pools: Pools) -> None:
    run = Run(TrainConfig(2, accumulate=2), batch_size=2, samples=7)
    plain = weights_of(plain_loop(run, batches_of(run)))
    for outcome in pools.run(3, train, run):
        assert relative_difference(outcome.weights, plain) < 1e-9


def test_metrics_have_loss_and_rate_at_each_interval_and_evaluation(pools: Pools, tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    config = Settings(2, accumulate=2, schedule={"warmup_steps": 4}, log_every=2, metrics_file=str(file))
    outcome, *_ = pools.run(2, train, Run(config, evaluate=True))
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    # 45 samples are 6 batches of 8, so 3 steps per epoch: one line after two steps and one at the end of the epoch.
    assert [(line["step"], sorted(line.keys() - {"step"})) for line in lines] == [
        (2, ["lr", "train/loss"]),
        (3, ["lr", "train/loss"]),
        (3, ["eval/error"]),
        (4, ["lr", "train/loss"]),
        (6, ["lr", "train/loss"]),
        (6, ["eval/error"]),
    ]
    # The rate used by a step; the warm-up counts optimizer steps, not micro-batches.
    assert [line["lr"] for line in lines if "lr" in line] == pytest.approx([LR * 2 / 4, LR * 3 / 4, LR, LR])
    assert outcome.result.metrics == {"error": lines[-1]["eval/error"]}
    # With a rate near zero, the loss is that of the initial weights over the samples of the logged steps.
    still = Run(Settings(1, schedule={"warmup_steps": 10**12}, log_every=100, metrics_file=str(file)))
    pools.run(2, train, still)
    data = Points(45, torch.float64)
    *earlier, line = [json.loads(line) for line in file.read_text().splitlines()]
    assert earlier == lines
    assert line["train/loss"] == pytest.approx(float(squared(net(still)(data.x), data.y).detach()) / 45)


KEPT = {
    # every, keep, epochs -> the checkpointed steps (6 per epoch)
    "every 4 steps and at the end of the run, the newest two": (4, 2, 3, [16, 18]),
    "a step that is due twice, once": (6, 9, 2, [6, 12]),
}


@pytest.mark.parametrize(("every", "keep", "epochs", "steps"), KEPT.values(), ids=KEPT)
def test_checkpoints_are_written_when_due_and_the_newest_kept(
    pools: Pools, tmp_path: Path, every: int | None, keep: int, epochs: int, steps: list[int]
) -> None:
    pools.run(2, train, Run(Settings(epochs, checkpoint_dir=str(tmp_path), checkpoint_every=every, keep=keep)))
    assert sorted(entry.name for entry in tmp_path.iterdir()) == [f"step-{step:08d}" for step in steps]


@pytest.mark.parametrize("size", [1, 2])
def test_nonfinite_gradient_ends_the_run_and_keeps_the_last_checkpoint(pools: Pools, tmp_path: Path, size: int) -> None:
    # A single rank did not check, so NaN weights were saved until no good checkpoint remained.
    config = Settings(2, checkpoint_dir=str(tmp_path), checkpoint_every=2, keep=1)
    for outcome in pools.run(size, train, Run(config, poisoned_step=5)):
        assert outcome.error.startswith(f"NonFiniteGradient: the gradient holds NaN or Inf on rank {size - 1}, in ")
        assert outcome.result.steps == 5
        assert all(abs(array).max() < 1e3 for array in outcome.weights.values())
    with Checkpointer(tmp_path) as checkpointer:
        assert checkpointer.latest() == tmp_path / "step-00000004"
    [outcome, *_] = pools.run(size, train, Run(Settings(2, checkpoint_dir=str(tmp_path), resume=True)))
    assert (outcome.result.resumed_from_step, outcome.result.steps, outcome.error) == (4, 12, "")


def test_folder_in_use_is_refused_without_resume_and_left_unchanged(pools: Pools, tmp_path: Path) -> None:
    config = Settings(1, checkpoint_dir=str(tmp_path))
    pools.run(2, train, Run(config))
    previous = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    for outcome in pools.run(2, train, Run(config)):
        assert "already holds checkpoints up to step 6; resume with resume=True (--resume)" in outcome.error
        assert outcome.seen == []
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == previous


def test_resume_from_an_empty_folder_is_refused(pools: Pools, tmp_path: Path) -> None:
    config = Settings(1, checkpoint_dir=str(tmp_path), resume=True)
    for outcome in pools.run(2, train, Run(config)):
        assert outcome.error.startswith("NoCheckpoint: ")


# -- partly trained models: parameters outside the optimizer, or modules in eval mode ----------------------------------


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
