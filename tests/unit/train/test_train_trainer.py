"""The Trainer compared with a plain PyTorch loop, and the files it writes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from paceline.checkpoint import Checkpointer
from paceline.data import GlobalBatchSampler
from paceline.train import TrainConfig
from trainings import LR, Points, Run, Settings, net, plain_loop, relative_difference, squared, train, weights_of
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
