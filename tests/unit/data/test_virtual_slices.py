"""Loaders with virtual ranks: the same slices, streams and seeds for any number of real ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset

from paceline.data import DataLoader, GlobalBatchSampler, GlobalBatchStream
from paceline.errors import DataError, UsageError

SAMPLES, BATCH, COUNT = 37, 16, 8


class Drawn(Dataset[Tensor]):
    """Samples of an index and a random number."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([index, float(torch.rand(()))], dtype=torch.float64)


class Stream(IterableDataset[Tensor]):
    def __iter__(self) -> Any:
        return (torch.tensor([index, float(torch.rand(()))], dtype=torch.float64) for index in range(SAMPLES))


def loader_of(kind: str, rank: int, size: int, **options: Any) -> DataLoader:
    if kind == "stream":
        return DataLoader(GlobalBatchStream(Stream(), BATCH, rank=rank, world_size=size), **options)
    sampler = GlobalBatchSampler(Drawn(), BATCH, rank=rank, world_size=size)
    return DataLoader(Drawn(), batch_sampler=sampler, **options)


def one_pass(loader: DataLoader, count: int | None) -> Iterator[Any]:
    return iter(loader) if count is None else loader.in_slices(count)


def numbers(batch: Any) -> Any:
    """Return a batch, or the batches of a pass, as numbers."""
    if isinstance(batch, Tensor):
        return batch.tolist()
    return None if batch is None else [numbers(part) for part in batch]


def slices_of_all(kind: str, size: int, **options: Any) -> list[list[tuple[int, Any]]]:
    """Return, for each global batch, the seeds and batches of all ranks' slices."""
    of_ranks = [list(loader_of(kind, rank, size, **options).in_slices(COUNT)) for rank in range(size)]
    return [
        [pair for slices in of_batch for pair in zip(slices.seeds, numbers(slices), strict=True)]
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


def test_one_slice_per_rank_fetches_the_same_as_without_virtual_ranks() -> None:
    for rank in range(COUNT):
        loader, twin = (loader_of("map", rank, COUNT) for _ in range(2))
        assert numbers(loader.in_slices(COUNT)) == [[batch or None] for batch in numbers(twin)]


@pytest.mark.parametrize(("count", "other_count"), [(8, 8), (8, 4), (8, None), (None, 8)])
def test_a_position_is_valid_for_any_number_of_slices(count: int | None, other_count: int | None) -> None:
    loader, other, twin = (loader_of("map", 0, size) for size in (4, 1, 1))
    next(one_pass(loader, count))
    state = loader.state_dict(consumed=1)
    assert state == loader_of("map", 1, 2).state_dict() | {"position": 1}
    other.load_state_dict(state)
    assert numbers(one_pass(other, other_count)) == numbers(one_pass(twin, other_count))[1:]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", ["map", "stream"])
def test_slices_do_not_carry_over_to_the_next_pass(kind: str, workers: int) -> None:
    """With two slices per rank, a plain loop "for x, y in loader" unpacked them as x and y."""
    loader = loader_of(kind, 0, 2, num_workers=workers, persistent_workers=workers > 0)
    for epoch, (count, other_count) in enumerate([(4, None), (None, 4), (4, 8), (8, None)]):
        left = one_pass(loader, count)
        next(left)
        twin = loader_of(kind, 0, 2)
        twin.progress.set_epoch(epoch)
        assert numbers(one_pass(loader, other_count)) == numbers(one_pass(twin, other_count))
        with pytest.raises(UsageError, match="another pass over the same loader or sampler has begun"):
            next(left)


def test_a_failing_sample_is_named() -> None:
    class Broken(Dataset[int]):
        def __getitem__(self, index: int) -> int:
            raise KeyError(index)

    sampler = GlobalBatchSampler(8, 8, shuffle=False, rank=0, world_size=1)
    loader = DataLoader(Broken(), batch_sampler=sampler)
    with pytest.raises(DataError, match="sample 0 of batch 0 of epoch 0"):
        next(loader.in_slices(4))


@pytest.mark.parametrize(
    ("count", "options", "words"),
    [
        (0, {}, "a global batch of 16 samples cannot be cut into virtual_ranks=0 slices"),
        (32, {}, "a global batch of 16 samples cannot be cut into virtual_ranks=32 slices"),
        (8, {"speed": [1]}, "speed= cuts batches into slices of different lengths"),
        (8, {"cost": range(1, SAMPLES + 1)}, "cost= cuts batches into slices of different lengths"),
        (1, {"rank": 0, "world_size": 2}, "2 ranks do not divide virtual_ranks=1"),
    ],
)
def test_unsupported_splits_are_refused(count: int, options: dict[str, Any], words: str) -> None:
    loader = DataLoader(Drawn(), batch_sampler=GlobalBatchSampler(SAMPLES, BATCH, **options))
    with pytest.raises(UsageError, match=words):
        next(loader.in_slices(count))
