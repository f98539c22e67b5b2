"""Promise: each sample is used once per epoch, in the same global batches, for any dataset size and number of ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import IterableDataset

from drawn import draws
from insides import batch_count
from paceline.data import DataLoader, GlobalBatchSampler, GlobalBatchStream

sizes = st.integers(1, 60)
batch_sizes = st.integers(1, 17)
worlds = st.integers(1, 5)
fast = draws(30)


def global_batches(size: int, batch_size: int, world_size: int, state: Any = None, **options: Any) -> list[list[int]]:
    """Return the global batches of one pass over all ranks; check that slices are even."""
    per_rank = []
    for rank in range(world_size):
        sampler = GlobalBatchSampler(size, batch_size, rank=rank, world_size=world_size, **options)
        if state:
            sampler.load_state_dict(state)
        per_rank.append(list(sampler))
    batches = []
    for slices in zip(*per_rank, strict=True):
        lengths = [len(share) for share in slices]
        assert max(lengths) - min(lengths) <= 1
        batches.append([index for share in slices for index in share])
    return batches


@pytest.mark.slow
@fast
@given(sizes, batch_sizes, worlds, st.booleans(), st.integers(0, 5))
def test_ranks_together_see_the_order_of_one_process(n: int, b: int, world_size: int, shuffle: bool, seed: int) -> None:
    together = global_batches(n, b, world_size, shuffle=shuffle, seed=seed)
    assert together == global_batches(n, b, 1, shuffle=shuffle, seed=seed)
    flat = [index for batch in together for index in batch]
    assert sorted(flat) == list(range(n))
    assert shuffle or flat == list(range(n))
    assert len(together) == batch_count(n, b, drop_last=False)


@fast
@given(sizes, batch_sizes, worlds)
def test_drop_last_drops_only_the_short_batch(n: int, b: int, world_size: int) -> None:
    if n >= b:
        whole = [batch for batch in global_batches(n, b, 1) if len(batch) == b]
        assert global_batches(n, b, world_size, drop_last=True) == whole


@fast
@given(st.lists(st.integers(0, 9), min_size=1, max_size=40), batch_sizes, worlds)
def test_given_order_is_kept_including_repeats(order: list[int], b: int, world_size: int) -> None:
    batches = global_batches(10, b, world_size, order=order)
    assert [index for batch in batches for index in batch] == order


@fast
@given(sizes, batch_sizes, st.lists(st.tuples(worlds, st.integers(0, 4)), min_size=1, max_size=4))
def test_a_run_that_changes_its_number_of_ranks_sees_the_same_batches(
    n: int, b: int, legs: list[tuple[int, int]]
) -> None:
    epochs = [global_batches(n, b, 1, state=at(n, b, epoch, 0)) for epoch in range(20)]
    expected = [batch for epoch in epochs for batch in epoch]
    state, seen = at(n, b, 0, 0), []
    for world_size, steps in legs:
        ranks = [GlobalBatchSampler(n, b, rank=rank, world_size=world_size) for rank in range(world_size)]
        for sampler in ranks:
            sampler.load_state_dict(state)
        streams = [endless(DataLoader(Indices(n), batch_sampler=sampler)) for sampler in ranks]
        for _ in range(steps):
            shares = [next(stream) for stream in streams]
            seen.append([index for share in shares if share is not None for index in share.tolist()])
        states = [sampler.state_dict() for sampler in ranks]
        assert all(other == states[0] for other in states)
        state = states[0]
    assert seen == expected[: len(seen)]


@fast
@given(sizes, batch_sizes, worlds, st.integers(0, 3), st.booleans())
def test_stream_visits_each_sample_once_and_resumes_on_any_number_of_ranks(
    n: int, b: int, world_size: int, consumed: int, drop_last: bool
) -> None:
    whole = [list(range(i, min(i + b, n))) for i in range(0, n, b)]
    expected = [batch for batch in whole if len(batch) == b] if drop_last else whole
    consumed = min(consumed, len(expected) - 1)
    if not expected:
        return
    first = DataLoader(GlobalBatchStream(Numbers(n), b, drop_last=drop_last, rank=0, world_size=1))
    for _, _batch in zip(range(consumed), first, strict=False):
        pass
    loaders = [
        DataLoader(GlobalBatchStream(Numbers(n), b, drop_last=drop_last, rank=rank, world_size=world_size))
        for rank in range(world_size)
    ]
    for loader in loaders:
        loader.load_state_dict({**first.state_dict(), "position": consumed, "epoch": 0})
    together = [
        [index for share in shares if share is not None for index in share.tolist()]
        for shares in zip(*loaders, strict=True)
    ]
    assert together == expected[consumed:]


class Indices:
    """A dataset whose samples are their indices."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(index)


class Numbers(IterableDataset):  # type: ignore[type-arg]
    """The stream 0, 1, 2, …"""

    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self) -> Any:
        return iter(range(self.size))


def endless(loader: DataLoader) -> Any:
    while True:
        yield from loader


def at(n: int, b: int, epoch: int, position: int) -> dict[str, Any]:
    sampler = GlobalBatchSampler(n, b, rank=0, world_size=1)
    return {**sampler.state_dict(), "epoch": epoch, "position": position}
