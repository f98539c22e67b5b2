"""Dataset digests notice changes, and resuming on changed data is refused."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset

from paceline.data.dataset_digest import outline_digest
from paceline.errors import CheckpointMismatch
from paceline.train import checkpoints
from paceline.train.checkpoints import DataIdentity, fingerprint
from trainings import Run, Settings, train
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
