"""A resume on changed data is refused, with how they changed; it goes on, and says so, where that is wanted."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset

from paceline.errors import CheckpointWarning
from paceline.train.resume.data_fingerprint import changes, fingerprint
from trainings import Outcome, Run, Settings, train
from twins import Pools

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
BACKWARDS = torch.arange(99, -1, -1)
CHANGES: dict[str, tuple[Callable[[], Any], Callable[[], Any], list[str]]] = {
    "one bit": (
        lambda: TensorDataset(X, Y),
        lambda: TensorDataset(edited(X, 7), Y),
        ["tensors[0] was edited"],
    ),
    "appended": (
        lambda: TensorDataset(X[:90], Y[:90]),
        lambda: TensorDataset(X, Y),
        ["10 samples were appended to 90"],
    ),
    "cut": (lambda: TensorDataset(X), lambda: TensorDataset(X[:90]), ["it has 90 samples, and had 100"]),
    "appended and edited": (
        lambda: TensorDataset(X[:90]),
        lambda: TensorDataset(edited(X, 3)),
        ["it has 100 samples, and had 90"],
    ),
    "reordered": (
        lambda: TensorDataset(X, Y),
        lambda: TensorDataset(X[BACKWARDS], Y[BACKWARDS]),
        ["tensors[0] was reordered", "tensors[1] was reordered"],
    ),
    "other dtype": (
        lambda: TensorDataset(X),
        lambda: TensorDataset(X.double()),
        ["tensors[0] has rows of [3] float64, and had rows of [3] float32"],
    ),
    "a file's name": (
        lambda: Files(NAMES, [0] * 100),
        lambda: Files([*NAMES[:50], "x.jpg", *NAMES[51:]], [0] * 100),
        ["names was edited"],
    ),
    "a target": (
        lambda: Files(NAMES, [0] * 100),
        lambda: Files(NAMES, [*[0] * 99, 1]),
        ["targets was edited"],
    ),
    "files in another order": (
        lambda: Files(NAMES, [0] * 100),
        lambda: Files(NAMES[::-1], [0] * 100),
        ["names was reordered"],
    ),
    "a version": (
        lambda: Versioned("1"),
        lambda: Versioned("2"),
        ["fingerprint is '2', and was '1'"],
    ),
    "other class": (
        lambda: Files(NAMES, [0] * 100),
        lambda: TensorDataset(X),
        ["it is a TensorDataset, and was a Files"],
    ),
    "a subset": (
        lambda: Subset(TensorDataset(X), [1, 2, 3]),
        lambda: Subset(TensorDataset(X), [1, 3, 2]),
        ["indices was reordered"],
    ),
    "a member": (
        lambda: ConcatDataset([TensorDataset(X), TensorDataset(Y)]),
        lambda: ConcatDataset([TensorDataset(X), TensorDataset(edited(Y, 99))]),
        ["datasets[1].tensors[0] was edited"],
    ),
}


@pytest.mark.parametrize(("before", "now", "said"), CHANGES.values(), ids=CHANGES)
def test_it_is_said_how_data_changed(before: Callable[[], Any], now: Callable[[], Any], said: list[str]) -> None:
    saved = fingerprint(before())
    assert changes(before(), saved) == []
    assert changes(now(), saved) == said


def warned(world: Any, run: Run) -> tuple[Outcome, list[str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", CheckpointWarning)
        return train(world, run), [str(each.message) for each in caught if each.category is CheckpointWarning]


def test_a_run_on_longer_data_is_refused_or_goes_on_and_says_so(pools: Pools, tmp_path: Path) -> None:
    quiet = Settings(1, checkpoint_dir=str(tmp_path), checkpoint_every=1, show_progress=False)
    run = Run(quiet, samples=45, stop_after=3)
    pools.run(2, train, run)
    longer = replace(run, samples=61, stop_after=None, config=replace(quiet, resume=True))
    for outcome in pools.run(2, train, longer):
        assert "the training data are not those that the checkpoint was written with" in outcome.error
        assert "61 samples, and had 45" in outcome.error
    allowed = replace(longer, config=replace(longer.config, allow_changed_data=True))
    for rank, (outcome, said) in enumerate(pools.run(2, warned, allowed)):
        assert (outcome.error, outcome.result.steps) == ("", 3 + 8)
        assert (rank == 0) == any("goes on with training data that have changed" in text for text in said)
        assert (rank == 0) == any("epoch 0 begins again" in text for text in said)
