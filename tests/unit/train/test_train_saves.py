"""A failed checkpoint write does not end training, and is reported."""

from __future__ import annotations

import json
import resource
import signal
import threading
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from insides import DueSaves
from paceline.errors import CheckpointWarning
from processes import paceline
from trainings import Outcome, Run, Settings, train
from twins import Pools

STEPS = 6


def with_a_full_disk(world: Any, run: Run, steps: list[int]) -> tuple[Outcome, list[str]]:
    """Train while rank 0 cannot write files in saves of `steps`. Return the outcome and the rank's warnings."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    save = DueSaves.save

    def fails(saves: DueSaves, saver: Any, step: int, metadata: Any = None, is_last: bool = False) -> None:
        if world.is_main and step in steps:
            resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
        try:
            save(saves, saver, step, metadata, is_last)
            for thread in threading.enumerate():
                if thread.name == "paceline-checkpoint":
                    thread.join()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    DueSaves.save = fails  # type: ignore[method-assign]
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", CheckpointWarning)
            return train(world, run), [str(item.message) for item in caught if item.category is CheckpointWarning]
    finally:
        DueSaves.save = save  # type: ignore[method-assign]


def config(folder: Path, **options: Any) -> Settings:
    return Settings(**{"epochs": 1, "checkpoint_dir": str(folder), "checkpoint_every": 1, **options})


@pytest.mark.parametrize(("size", "async_save"), [(1, False), (2, True)])
def test_training_continues_and_the_next_save_tries_again(
    pools: Pools, tmp_path: Path, size: int, async_save: bool
) -> None:
    # A full disk ended the training and lost all progress since the previous checkpoint.
    run = Run(config(tmp_path / "whole", keep=9), dropout=0.3)
    whole = pools.run(size, train, run)
    cut = replace(run, config=config(tmp_path / "cut", keep=9, async_save=async_save))
    results = pools.run(size, with_a_full_disk, cut, [2, 3, 5])
    for one, (outcome, _) in zip(whole, results, strict=True):
        assert (outcome.error, outcome.bits()) == ("", one.bits())
        assert outcome.result.failed_saves == [2, 3, 5]
    messages = [message for _, warned in results for message in warned]
    assert results[0][1] == messages, "only on rank 0"
    for step, message in zip((2, 5), messages, strict=True):  # one warning until a save succeeds
        assert f"rank 0 could not save step {step} to {tmp_path}/cut/step-0000000{step}: File too large; " in message
        assert "training continues, and the next save tries again" in message
    names = sorted(path.name for path in (tmp_path / "cut").iterdir())
    assert names == [f"step-0000000{step}" for step in (1, 4, 6)]


def test_last_good_checkpoint_is_kept_and_a_missing_final_one_is_reported(pools: Pools, tmp_path: Path) -> None:
    run = Run(config(tmp_path, keep=1))
    results = pools.run(2, with_a_full_disk, run, [3, 4, 5, 6])
    for outcome, _ in results:
        assert (outcome.error, outcome.result.steps, outcome.result.failed_saves) == ("", STEPS, [3, 4, 5, 6])
    assert ["this was the last save" in message for message in results[0][1]] == [False, True]
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000002"]
    for outcome in pools.run(2, train, replace(run, config=replace(run.config, resume=True))):
        assert (outcome.error, outcome.result.resumed_from_step) == ("", 2)


def test_recipe_without_a_final_checkpoint_reports_its_result_and_fails(tmp_path: Path) -> None:
    # A file blocks the name of the last step's checkpoint, so only that save fails.
    options = ("--epochs", "1", "--checkpoint-dir", "runs", "--checkpoint-every", "20", "--json", "report.json")
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "step-00000045").write_text("in the way")
    done = paceline(tmp_path, "train", "digits", "--nproc", "1", *options, fork="all", OMP_NUM_THREADS="1")
    assert done.returncode == 1, done.stderr
    assert json.loads((tmp_path / "report.json").read_text())["steps"] == 45
    assert "the last step 45 could not be saved in runs" in done.stderr
    assert sorted(path.name for path in (tmp_path / "runs").iterdir())[:2] == ["step-00000020", "step-00000040"]
