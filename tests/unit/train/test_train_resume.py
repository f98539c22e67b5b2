"""Changes that are allowed when a run resumes, and changes that are refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from paceline.train import EarlyStopping
from paceline.train.checkpoints import Saves
from paceline.train.run import RunState
from trainings import Outcome, Run, Settings, in_silence, train
from twins import Pools


def config(folder: Path, **options: Any) -> Settings:
    given = {"epochs": 3, "checkpoint_every": 1, **options}
    return Settings(checkpoint_dir=str(folder), **given)


def interrupted(pools: Pools, size: int, run: Run, step: int) -> list[Outcome]:
    """Stop after the checkpoint of `step` and resume; return the outcomes of the resumed run."""
    for outcome in pools.run(size, train, replace(run, stop_after=step)):
        assert (outcome.error, outcome.result.steps) == ("", step)
    outcomes = pools.run(size, train, replace(run, config=replace(run.config, resume=True)))
    for outcome in outcomes:
        assert (outcome.error, outcome.result.resumed_from_step) == ("", step)
    return outcomes


def test_metrics_line_after_resuming_on_other_ranks_counts_all_samples(pools: Pools, tmp_path: Path) -> None:
    options = {"log_every": 5, "epochs": 1}
    run = Run(config(tmp_path / "whole", metrics_file=str(tmp_path / "whole.jsonl"), **options))
    pools.run(2, train, run)
    cut = replace(run, config=config(tmp_path / "cut", metrics_file=str(tmp_path / "cut.jsonl"), **options))
    pools.run(2, train, replace(cut, stop_after=3))
    pools.run(1, in_silence, replace(cut, config=replace(cut.config, resume=True)))
    lines = [
        [json.loads(line)["train/loss"] for line in (tmp_path / name).read_text().splitlines()]
        for name in ("whole.jsonl", "cut.jsonl")
    ]
    assert lines[1] == pytest.approx(lines[0], rel=1e-9)


@pytest.mark.slow
def test_resume_with_data_dependent_buffers_that_affect_the_forward(pools: Pools, tmp_path: Path) -> None:
    # Micro-batches under no_sync do not broadcast buffers: rank 1 continued with its own, but resumed with rank 0's.
    run = Run(config(tmp_path / "whole", accumulate=2), memory=True)
    whole = pools.run(2, train, run)
    again = interrupted(pools, 2, replace(run, config=config(tmp_path / "cut", accumulate=2)), 2)
    assert [outcome.bits() for outcome in again] == [outcome.bits() for outcome in whole]


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"batch_size": 9}, "batch_size=8, but this run has batch_size=9"),
    ({"seed": 4}, "seed was 3 when the checkpoint was written but is 4 now"),
    ({"dtype": torch.float32}, "the training data differ from the checkpoint's in x, y"),
    ({"adam": True}, "optimizer"),
]


def test_incompatible_run_is_refused_before_training(pools: Pools, tmp_path: Path) -> None:
    run = Run(config(tmp_path, epochs=1))
    pools.run(2, train, run)
    previous = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    for change, message in REFUSED:
        for outcome in pools.run(2, train, replace(run, config=config(tmp_path, epochs=2, resume=True), **change)):
            assert outcome.error.startswith("CheckpointMismatch: ")
            assert message in outcome.error
            assert outcome.seen == []
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == previous


@pytest.mark.parametrize(
    ("metric", "mode", "is_same"), [("loss", "min", True), ("loss", "max", False), ("acc", "min", False)]
)
def test_best_value_of_another_metric_or_mode_is_ignored(metric: str, mode: Any, is_same: bool) -> None:
    # An accuracy was compared with the best loss: it was never saved as the best, or the run ended early.
    stopping, state = EarlyStopping("loss"), RunState(may_continue=False)
    for value in (1.0, 2.0):
        stopping.on_evaluation(Mock(metrics={"eval/loss": value}))
    state.evaluated({"loss": 1.0})
    assert Saves(Mock(keep_best=("loss", "min")), Mock(), state).is_best()

    again, resumed = EarlyStopping(metric, mode), RunState(may_continue=False)
    again.load_state_dict(stopping.state_dict())
    assert (again.best, again.wait) == ((1.0, 1) if is_same else (None, 0))
    resumed.load_state_dict(state.state_dict())
    resumed.evaluated({metric: 1.0})
    saves = Saves(Mock(keep_best=(metric, mode)), Mock(), resumed)
    assert [saves.is_best(), saves.is_best()] == [not is_same, False]
