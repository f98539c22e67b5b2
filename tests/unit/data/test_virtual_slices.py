"""Loaders with virtual ranks: the same slices, streams and seeds, whatever the number of ranks that share them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset

from paceline.data import DataLoader, GlobalBatchSampler, GlobalBatchStream
from paceline.errors import DataError, UsageError

SAMPLES, BATCH, COUNT = 37, 16, 8


class Drawn(Dataset[Tensor]):
    """A sample is its index and a random number."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([index, float(torch.rand(()))], dtype=torch.float64)


class Stream(IterableDataset[Tensor]):
    def __iter__(self) -> Any:
        return (torch.tensor([index, float(torch.rand(()))], dtype=torch.float64) for index in range(SAMPLES))


def loader_of(kind: str, rank: int, size: int, **options: Any) -> DataLoader:
    if kind == "stream":
        loader = DataLoader(GlobalBatchStream(Stream(), BATCH, rank=rank, world_size=size), **options)
    else:
        sampler = GlobalBatchSampler(Drawn(), BATCH, rank=rank, world_size=size)
        loader = DataLoader(Drawn(), batch_sampler=sampler, **options)
    loader.use_virtual_ranks(COUNT)
    return loader


def slices_of_all(kind: str, size: int, **options: Any) -> list[list[tuple[int, Any]]]:
    """Return, for each global batch, the seeds and batches of all ranks' slices."""
    of_ranks = [list(loader_of(kind, rank, size, **options)) for rank in range(size)]
    return [
        [
            (seed, None if batch is None else batch.tolist())
            for slices in of_batch
            for seed, batch in zip(slices.seeds, slices, strict=True)
        ]
        for of_batch in zip(*of_ranks, strict=True)
    ]


@pytest.mark.parametrize("kind", ["map", "stream"])
def test_slices_and_seeds_are_the_same_for_every_number_of_ranks(kind: str) -> None:
    alone = slices_of_all(kind, 1)
    assert [len(slices) for slices in alone] == [COUNT] * 3
    assert [batch is None for _, batch in alone[-1]] == [False] * 5 + [True] * 3  # of 5 samples
    assert len({seed for slices in alone for seed, _ in slices}) == 3 * COUNT
    for size in (2, 4, 8):
        assert slices_of_all(kind, size) == alone


def test_with_as_many_slices_as_ranks_each_fetches_what_it_does_without_virtual_ranks() -> None:
    for rank in range(COUNT):
        sampler = GlobalBatchSampler(Drawn(), BATCH, rank=rank, world_size=COUNT)
        plain = list(DataLoader(Drawn(), batch_sampler=sampler))
        for ours, theirs in zip(loader_of("map", rank, COUNT), plain, strict=True):
            assert ours[0] is theirs is None or torch.equal(ours[0], theirs)


def test_a_position_means_the_same_to_another_number_of_ranks() -> None:
    loader = loader_of("map", 0, 4)
    next(iter(loader))
    state = loader.state_dict(consumed=1)
    assert state == loader_of("map", 1, 2).state_dict() | {"position": 1}
    other = loader_of("map", 0, 1)
    other.load_state_dict(state)
    assert [slices.seeds for slices in other] == [slices.seeds for slices in loader_of("map", 0, 1)][1:]


def test_a_sample_that_fails_is_named() -> None:
    class Broken(Dataset[int]):
        def __getitem__(self, index: int) -> int:
            raise KeyError(index)

    sampler = GlobalBatchSampler(8, 8, shuffle=False, rank=0, world_size=1)
    loader = DataLoader(Broken(), batch_sampler=sampler)
    loader.use_virtual_ranks(4)
    with pytest.raises(DataError, match="sample 0 of batch 0 of epoch 0"):
        next(iter(loader))


@pytest.mark.parametrize(
    ("count", "options", "words"),
    [
        (32, {}, "a global batch of 16 samples cannot be cut into virtual_ranks=32 slices"),
        (8, {"speed": [1]}, "speed= cuts batches into slices of different lengths"),
        (8, {"cost": range(1, SAMPLES + 1)}, "cost= cuts batches into slices of different lengths"),
        (1, {"rank": 0, "world_size": 2}, "2 ranks do not divide virtual_ranks=1"),
    ],
)
def test_what_cannot_be_cut_so_is_refused(count: int, options: dict[str, Any], words: str) -> None:
    loader = DataLoader(Drawn(), batch_sampler=GlobalBatchSampler(SAMPLES, BATCH, **options))
    with pytest.raises(UsageError, match=words):
        loader.use_virtual_ranks(count)


def test_another_loader_than_ours_is_refused() -> None:
    with pytest.raises(UsageError, match=r"use paceline\.data\.DataLoader"):
        next(iter(loader_of("map", 0, 1).progress))
