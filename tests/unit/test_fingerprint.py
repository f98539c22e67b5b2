"""Digests of data sets: what they notice, and what they leave alone."""

from __future__ import annotations

import random
from typing import Any

import numpy
import pytest
import torch
from torch.utils.data import Dataset, TensorDataset

from paceline.errors import CheckpointMismatch
from paceline.fingerprint import PROBES, dataset_digest, tensor_digest, weights_sha256
from paceline.rng import rng_state
from paceline.train.identity import DataIdentity
from trainings import digest


class Listed(Dataset[Any]):
    """Samples from a list."""

    def __init__(self, samples: list[Any]) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        return self.samples[index]


class Augmented(Listed):
    """Every sample with noise of three generators."""

    def __getitem__(self, index: int) -> Any:
        return self.samples[index] + torch.randn(()) + random.random() + numpy.random.rand()


X = torch.arange(12.0).view(4, 3)
SAMPLES: dict[str, list[Any]] = {
    "tensors": [torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0]), torch.tensor([5.0, 6.0])],
    "NumPy arrays": [numpy.array([1.0, 2.0]), numpy.array([3.0, 4.0]), numpy.array([5.0, 6.0])],
    "NumPy scalars": [numpy.float32(1), numpy.float32(2), numpy.float32(3)],
    "pairs": [(torch.zeros(2), 1), (torch.zeros(2), 2), (torch.zeros(2), 3)],
    "dicts": [{"ids": [1, 23], "label": 0}, {"ids": [4, 5], "label": 1}, {"ids": [6], "label": 0}],
    "texts": ["a", "b", "c"],
}


@pytest.mark.parametrize("samples", SAMPLES.values(), ids=SAMPLES)
def test_a_data_set_is_known_by_edits_appends_and_order(samples: list[Any]) -> None:
    first, second, third = samples
    digests = [
        dataset_digest(Listed(each))
        for each in ([first, second, third], [first, third, second], [first, second], [first, second, third, first])
    ]
    assert len(set(digests)) == 4
    assert dataset_digest(Listed(list(samples))) == digests[0]


def test_every_element_of_a_tensor_data_set_counts() -> None:
    digests = {
        dataset_digest(TensorDataset(X)),
        dataset_digest(TensorDataset(X, X)),
        dataset_digest(TensorDataset(X.t())),
    }
    for index in range(X.numel()):
        edited = X.clone()
        edited.view(-1)[index] += 1e-6
        digests.add(dataset_digest(TensorDataset(edited)))
    assert len(digests) == 3 + X.numel()
    assert dataset_digest(TensorDataset(X.clone())) in digests


AMBIGUOUS = [((1, 23), (12, 3)), (("a", "bc"), ("ab", "c")), ((1, (2, 3)), ((1, 2), 3)), (1, "1"), (1.0, 1), ([], {})]


@pytest.mark.parametrize(("one", "other"), AMBIGUOUS)
def test_samples_that_read_alike_have_other_digests(one: Any, other: Any) -> None:
    # (1, 23) and (12, 3) had one digest, because their parts were strung together without a mark between them.
    assert dataset_digest(Listed([one])) != dataset_digest(Listed([other]))


@pytest.mark.parametrize("size", [1, 2, PROBES, 1000])
def test_first_and_last_sample_and_the_length_always_count(size: int) -> None:
    samples = list(range(size))
    digests = {
        dataset_digest(Listed(each)) for each in (samples, [-1, *samples[1:]], [*samples[:-1], -2], [*samples, 0])
    }
    assert len(digests) == 4


def test_the_random_streams_are_left_alone_and_augmentation_does_not_matter() -> None:
    before = digest(rng_state())
    first = dataset_digest(Augmented([1.0, 2.0, 3.0]))
    assert digest(rng_state()) == before
    torch.randn(3)
    assert dataset_digest(Augmented([1.0, 2.0, 3.0])) == first


def test_the_streams_come_back_when_a_sample_cannot_be_read() -> None:
    class Broken(Listed):
        def __getitem__(self, index: int) -> Any:
            raise OSError("gone")

    before = digest(rng_state())
    with pytest.raises(OSError, match="gone"):
        dataset_digest(Broken([1]))
    assert digest(rng_state()) == before


def test_data_that_changed_are_refused() -> None:
    saved = DataIdentity(Listed([1, 2])).state_dict()
    DataIdentity(Listed([1, 2])).load_state_dict(saved)
    with pytest.raises(CheckpointMismatch, match="the training data are not those"):
        DataIdentity(Listed([2, 1])).load_state_dict(saved)


def test_a_tensors_digest_is_that_of_its_elements_in_order() -> None:
    assert tensor_digest(X.t()) == tensor_digest(X.t().contiguous())
    assert tensor_digest(X.t()) != tensor_digest(X)
    assert tensor_digest(torch.zeros(0, 3)) == tensor_digest(torch.zeros(0))
    assert tensor_digest(torch.zeros(2, dtype=torch.bfloat16)) == tensor_digest(torch.zeros(1))


def test_names_values_and_buffers_make_the_digest_of_weights() -> None:
    def norm() -> torch.nn.BatchNorm1d:
        return torch.nn.BatchNorm1d(2)

    other = norm()
    other.running_mean += 1
    one, two = torch.nn.ModuleDict({"a": norm()}), torch.nn.ModuleDict({"b": norm()})
    assert weights_sha256(norm()) == weights_sha256(norm())
    assert len({weights_sha256(module) for module in (norm(), other, one, two)}) == 4
