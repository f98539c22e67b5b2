"""Changes that are allowed when a run resumes, and changes that are refused, also of the data."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset

from insides import DataIdentity, RunState, Saves, checkpoints, fingerprint, outline_digest
from paceline.errors import CheckpointMismatch
from paceline.train import EarlyStopping
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


# -- changed data ------------------------------------------------------------------------------------------------------


X = torch.randn(100, 3, generator=torch.Generator().manual_seed(1))
Y = torch.arange(100)


class Files(Dataset[Any]):
    def __init__(self, names: list[str], targets: list[int]) -> None:
        self.names, self.targets = names, targets

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, index: int) -> Any:
        raise AssertionError("no sample is read for a fingerprint")


class Versioned(Files):
    def __init__(self, version: str) -> None:
        super().__init__(["a"], [1])
        self.fingerprint = version


def edited(values: torch.Tensor, row: int) -> torch.Tensor:
    changed = values.clone()
    changed.view(torch.uint8).view(len(values), -1)[row, 0] ^= 1
    return changed


NAMES = [f"{number}.jpg" for number in range(100)]
CHANGES: dict[str, tuple[Any, Any, str]] = {
    "one bit": (TensorDataset(X, Y), TensorDataset(edited(X, 7), Y), "tensors[0]"),
    "appended": (TensorDataset(X[:90], Y[:90]), TensorDataset(X, Y), "number of samples, tensors[0], tensors[1]"),
    "cut": (TensorDataset(X), TensorDataset(X[:90]), "number of samples, tensors[0]"),
    "reordered": (TensorDataset(X, Y), TensorDataset(X.flip(0), Y.flip(0)), "tensors[0], tensors[1]"),
    "other dtype": (TensorDataset(X), TensorDataset(X.double()), "tensors[0]"),
    "other shape": (TensorDataset(X), TensorDataset(X[:, :, None]), "tensors[0]"),
    "names": (Files(NAMES, [0] * 100), Files(NAMES[::-1], [0] * 100), "names"),
    "a target": (Files(NAMES, [0] * 100), Files(NAMES, [*[0] * 99, 1]), "targets"),
    "a version": (Versioned("1"), Versioned("2"), "fingerprint"),
    "other class": (Files(NAMES, [0] * 100), TensorDataset(X), "class, names, targets, tensors[0]"),
    "a subset": (Subset(TensorDataset(X), [1, 2, 3]), Subset(TensorDataset(X), [1, 3, 2]), "indices"),
    "a member": (
        ConcatDataset([TensorDataset(X), TensorDataset(Y)]),
        ConcatDataset([TensorDataset(X), TensorDataset(edited(Y, 99))]),
        "datasets[1].tensors[0]",
    ),
}


@pytest.mark.parametrize(("previous", "now", "said"), CHANGES.values(), ids=CHANGES)
def test_message_describes_how_data_changed(previous: Any, now: Any, said: str) -> None:
    saved = DataIdentity(previous).state_dict()
    DataIdentity(previous).check_state_dict(saved)
    with pytest.raises(CheckpointMismatch, match=re.escape(f"the checkpoint's in {said}; resume")):
        DataIdentity(now).check_state_dict(saved)


def test_rows_of_a_large_column_are_sampled_from_first_to_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoints, "WHOLE_BYTES", 100)
    monkeypatch.setattr(checkpoints, "MOST_ROWS", 4)  # rows 0, 33, 66 and 99
    saved = fingerprint(TensorDataset(X))
    assert [row for row in range(100) if fingerprint(TensorDataset(edited(X, row))) != saved] == [0, 33, 66, 99]


SMALL = torch.arange(12.0).view(4, 3)


def of_data(dataset: Any) -> tuple[str, int]:
    """Return the data description in a checkpoint, and the one that ranks compare."""
    return json.dumps(fingerprint(dataset)), outline_digest(dataset)


def test_other_datasets_are_recognized_by_class_and_length_without_reading_samples() -> None:
    # Samples were read. For datasets with their own random numbers every resume was then refused, and files were opened
    # before the workers were forked.
    three = Files(NAMES[:3], [0] * 3)
    assert of_data(three) == of_data(Files(NAMES[:3], [0] * 3))
    assert of_data(three) != of_data(Files(NAMES[:4], [0] * 4))
    assert of_data(three) != of_data(NAMES[:3])
    assert of_data(object()) == of_data(object())


def test_fingerprint_of_the_dataset_takes_precedence() -> None:
    assert of_data(Versioned("a")) == of_data(Versioned("a"))
    assert of_data(Versioned("a")) != of_data(Versioned("b"))

    class Tensors(TensorDataset):
        fingerprint = "mine"

    assert of_data(Tensors(SMALL)) == of_data(Tensors(SMALL + 1))


def test_run_on_longer_data_is_refused(pools: Pools, tmp_path: Path) -> None:
    quiet = Settings(1, checkpoint_dir=str(tmp_path), checkpoint_every=1)
    run = Run(quiet, samples=45, stop_after=3)
    pools.run(2, train, run)
    longer = replace(run, samples=61, stop_after=None, config=replace(quiet, resume=True))
    for outcome in pools.run(2, train, longer):
        assert "the training data differ from the checkpoint's in number of samples, x, y; resume on" in outcome.error
