"""Digests of data sets: what they notice, and what they leave alone."""

from __future__ import annotations

import json
from typing import Any

import torch
from torch.utils.data import Dataset, TensorDataset

from paceline.data.dataset_digest import outline_digest
from paceline.train.resume.data import fingerprint


class Sealed(Dataset[Any]):
    """A data set that must not be asked for a sample, as it would open its file."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Any:
        raise AssertionError(f"sample {index} was asked for")


class Versioned(Sealed):
    """One that says itself which data it has."""

    def __init__(self, size: int, version: str) -> None:
        super().__init__(size)
        self.version = version

    @property
    def fingerprint(self) -> str:
        return self.version


X = torch.arange(12.0).view(4, 3)


def of_data(dataset: Any) -> tuple[str, int]:
    """What a checkpoint keeps of the data, and what ranks compare."""
    return json.dumps(fingerprint(dataset)), outline_digest(dataset)


def test_every_element_of_a_tensor_data_set_counts() -> None:
    digests = {
        of_data(TensorDataset(X)),
        of_data(TensorDataset(X, X)),
        of_data(TensorDataset(X.t())),
        of_data(TensorDataset(X.double())),
        of_data(TensorDataset(X.flip(0))),
    }
    for index in range(X.numel()):
        edited = X.clone()
        edited.view(-1)[index] += 1e-6
        digests.add(of_data(TensorDataset(edited)))
    assert len(digests) == 5 + X.numel()
    assert of_data(TensorDataset(X.clone())) in digests


def test_another_data_set_is_known_by_class_and_length_and_no_sample_is_read() -> None:
    # Samples were probed: with random numbers of the data set's own, every resume was refused; and files were opened
    # before the workers were forked.
    assert of_data(Sealed(3)) == of_data(Sealed(3))
    assert of_data(Sealed(3)) != of_data(Sealed(4))
    assert of_data(Sealed(3)) != of_data(["a", "b", "c"])
    assert of_data(object()) == of_data(object())


def test_a_fingerprint_of_the_data_sets_own_decides() -> None:
    assert of_data(Versioned(3, "a")) == of_data(Versioned(3, "a"))
    assert of_data(Versioned(3, "a")) != of_data(Versioned(3, "b"))

    class Tensors(TensorDataset):
        fingerprint = "mine"

    assert of_data(Tensors(X)) == of_data(Tensors(X + 1))
