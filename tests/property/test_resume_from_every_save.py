"""A run that is resumed from any of its saves ends with the bits, the metrics and the log of one that was not."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from paceline.train import TrainConfig
from trainings import Outcome, Run, Settings, in_silence, relative_difference
from twins import Pools

# 45 samples in batches of 8 are 6 micro-batches, so a window of 4 and one of 2.
RUN = Run(TrainConfig(1), augment=True, adam=True, evaluate=True, random_evaluation=True)


def trained(pools: Pools, size: int, run: Run, folder: Path, **options: Any) -> list[Outcome]:
    config = Settings(
        epochs=3,
        accumulate=4,
        clip_norm=1.0,
        schedule={"warmup_steps": 2, "decay": "linear", "total_steps": 6},
        checkpoint_dir=str(folder),
        checkpoint_every=1,
        keep=99,
        metrics_file=str(folder / "metrics.jsonl"),
        log_every=2,
        show_progress=False,
        **options,
    )
    outcomes = pools.run(size, in_silence, replace(run, config=config))
    assert [outcome.error for outcome in outcomes] == [""] * size
    return outcomes


def cut(whole: Path, folder: Path, step: int) -> Path:
    """What a run leaves that is killed just before it saves the step after `step`, its log further than its saves."""
    shutil.copytree(whole, folder)
    for entry in folder.glob("step-*"):
        if int(entry.name[5:]) > step:
            shutil.rmtree(entry)
    return folder


def expect_equal_from_every_save(pools: Pools, size: int, run: Run, folder: Path, whole: list[Outcome]) -> None:
    saved = sorted(int(entry.name[5:]) for entry in folder.glob("step-*"))
    first = whole[0].result.resumed_from_step or 0
    for step in (step for step in saved if step > first):
        again = cut(folder, folder.parent / f"{folder.name}-{step}", step)
        for one, other in zip(whole, trained(pools, size, run, again, resume=True), strict=True):
            assert other.result.resumed_from_step == step
            assert other.bits() == one.bits()
            assert other.result.metrics == one.result.metrics
            assert other.seen == one.seen[len(one.seen) - len(other.seen) :]
        assert (again / "metrics.jsonl").read_text() == (folder / "metrics.jsonl").read_text()


@pytest.mark.slow
def test_from_every_save_of_a_run_with_random_evaluation_and_short_windows(pools: Pools, tmp_path: Path) -> None:
    # The evaluation came after the save and was left out by the resumed run, which then drew other numbers.
    run = replace(RUN, dropout=0.3)
    whole = trained(pools, 2, run, tmp_path / "whole")
    assert (whole[0].result.steps, whole[0].result.samples) == (6, 3 * 45)
    assert len({one.generators_sha256 for one in whole}) == 2, "every rank has streams of its own"
    expect_equal_from_every_save(pools, 2, run, tmp_path / "whole", whole)


@pytest.mark.slow
def test_from_every_save_after_the_number_of_ranks_has_changed(pools: Pools, tmp_path: Path) -> None:
    run = replace(RUN, augment=False)  # augmentation differs by rank, so with their number
    whole = trained(pools, 2, run, tmp_path / "whole")
    for step in (1, 2):
        folder = cut(tmp_path / "whole", tmp_path / f"three-from-{step}", step)
        changed = trained(pools, 3, run, folder, resume=True)
        assert changed[0].result.resumed_from_step == step
        assert relative_difference(changed[0].weights, whole[0].weights) < 1e-9
        if step == 2:  # where an evaluation is due
            expect_equal_from_every_save(pools, 3, run, folder, changed)
