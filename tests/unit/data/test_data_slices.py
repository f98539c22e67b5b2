"""Slices of global batches: sizes by speed, virtual ranks, and empty slices."""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import product
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import Dataset, IterableDataset
from transformers import BatchEncoding

from drawn import draws
from insides import shares_by_speed, slice_bounds, split_by_cost
from paceline.data import DataLoader, GlobalBatchSampler, GlobalBatchStream
from paceline.errors import DataError, UsageError

speeds = st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=8).map(tuple)


@draws(40)
@given(st.integers(0, 400), speeds)
def test_slices_are_contiguous_and_nonempty_if_there_are_enough_samples(count: int, by: tuple[float, ...]) -> None:
    bounds = [slice_bounds(count, rank, len(by), by) for rank in range(len(by))]
    assert [low for low, _ in bounds] == [0, *(high for _, high in bounds[:-1])]
    assert bounds[-1][1] == count
    assert count < len(by) or all(high > low for low, high in bounds)


@draws(40)
@given(st.integers(0, 400), speeds)
def test_a_share_is_the_rounded_quota_unless_a_rank_would_be_empty(count: int, by: tuple[float, ...]) -> None:
    quotas = [count * speed / math.fsum(by) for speed in by]
    if min(quotas) >= 1:
        shares = shares_by_speed(count, by)
        assert all(abs(share - quota) < 1 + 1e-9 for share, quota in zip(shares, quotas, strict=True))


@draws(40)
@given(st.integers(1, 400), speeds)
def test_a_faster_rank_never_gets_fewer_samples(count: int, by: tuple[float, ...]) -> None:
    shares = shares_by_speed(count, by)
    for (one, its), (other, theirs) in product(zip(by, shares, strict=True), repeat=2):
        assert its >= theirs or one <= other


@pytest.mark.parametrize(
    ("count", "by", "shares"),
    [
        (64, (2, 1, 1), (32, 16, 16)),
        (10, (1, 1, 1), (4, 3, 3)),
        (8, (1, 0.5), (5, 3)),  # 5.33 and 2.67: the larger remainder
        (4, (1000, 1, 1, 1), (1, 1, 1, 1)),
        (8, (1000, 1, 1, 1), (5, 1, 1, 1)),
        (2, (1, 3, 2), (0, 1, 1)),
        (0, (1, 3), (0, 0)),
        (100, (1e300, 1e300, 1e-300), (50, 49, 1)),
    ],
)
def test_shares(count: int, by: tuple[float, ...], shares: tuple[int, ...]) -> None:
    assert shares_by_speed(count, by) == shares


@draws(40)
@given(st.lists(st.integers(1, 20), min_size=2, max_size=7), st.lists(st.integers(1, 5), min_size=2, max_size=3))
def test_a_split_by_cost_and_speed_takes_less_than_twice_the_optimal_time(costs: list[float], by: list[float]) -> None:
    """The bound is 2 - 2 / (ranks + 1), apart from samples given to ranks to avoid empty slices."""
    if len(costs) < len(by):
        return
    best = min(
        max(
            sum(cost for cost, owner in zip(costs, owners, strict=True) if owner == rank) / by[rank]
            for rank in range(len(by))
        )
        for owners in product(range(len(by)), repeat=len(costs))
    )
    _, loads = split_by_cost(costs, len(by), None, by)
    forced = max(costs) / min(by)
    assert max(load / speed for load, speed in zip(loads, by, strict=True)) <= max(2 * best, forced) + 1e-9


# -- mistakes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("speed", "message"),
    [
        ([2, 1], r"speed=\[2.0, 1.0\] has 2 speeds for 3 ranks; give a number > 0 for each rank"),
        ([2, 0, 1], r"the speed of rank 1 is 0; give a number > 0"),
        ([2, 1, -1], r"the speed of rank 2 is -1"),
        ([float("nan"), 1, 1], r"the speed of rank 0 is nan"),
        ([1, float("inf"), 1], r"the speed of rank 1 is inf"),
        ("fastest", r"speed='fastest' is not a list of numbers"),
        (2.0, r"speed=2.0 is not a list of numbers"),
        (["fast", 1, 1], r"speed=\['fast', 1, 1\] is not a list of numbers"),
    ],
)
def test_invalid_speeds_are_refused_in_one_line(speed: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        GlobalBatchSampler(30, 6, speed=speed, rank=0, world_size=3)
    assert "\n" not in str(caught.value)
    assert isinstance(caught.value, ValueError)


def test_a_global_batch_below_the_number_of_ranks_is_refused() -> None:
    with pytest.raises(UsageError, match="a global batch of 3 samples cannot be cut by speed among 4 ranks"):
        GlobalBatchSampler(30, 3, speed=[1] * 4, rank=0, world_size=4)


def test_one_rank_takes_whole_batches() -> None:
    plain = list(DataLoader(list(range(30)), 7, shuffle=True))
    batches = list(DataLoader(list(range(30)), 7, shuffle=True, speed=[3]))
    assert [batch.tolist() for batch in batches] == [batch.tolist() for batch in plain]


# -- virtual ranks -----------------------------------------------------------------------------------------------------


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


# -- empty slices ------------------------------------------------------------------------------------------------------


class Fields(NamedTuple):
    x: Any
    names: Any


class Counted(Dataset[Any]):
    """Ten samples that draw random numbers; counts the loads of each."""

    def __init__(self) -> None:
        self.loaded: Counter[int] = Counter()

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> Tensor:
        self.loaded[index] += 1
        return index + torch.rand(1, 3)


@pytest.mark.parametrize(
    ("collate", "expected"),
    [
        (torch.stack, "(0, 1, 3)"),
        (torch.cat, "(0, 3)"),
        (lambda samples: torch.stack(samples, 1), "(1, 0, 3)"),
        (lambda samples: [torch.stack(samples)], "[(0, 1, 3)]"),
        (lambda samples: Fields(torch.stack(samples), ["a"] * len(samples)), "Fields(x=(0, 1, 3), names=[])"),
        (lambda samples: {"x": (torch.cat(samples).numpy(), 1.5, None)}, "{'x': ((0, 3), 1.5, None)}"),
        (lambda samples: (torch.cat(samples), len(samples), "a"), "((0, 3), 0, 'a')"),
        (lambda samples: BatchEncoding({"x": torch.cat(samples)}), "{'x': (0, 3)}"),
        (lambda samples: list(samples), "it contains a list, which cannot be emptied"),
        (lambda samples: ({}, len(samples)), "no tensor has one row per sample"),
        (lambda samples: pack_sequence(samples), "it contains a PackedSequence, which cannot be emptied"),
    ],
)
@pytest.mark.parametrize("workers", [0, 1])
def test_an_empty_slice_gives_an_empty_batch_or_one_warning(collate: Any, expected: str, workers: int) -> None:
    def shown(value: Any) -> Any:
        if hasattr(value, "shape"):
            return tuple(value.shape)
        if isinstance(value, Mapping):
            return {key: shown(part) for key, part in value.items()}
        if isinstance(value, list | tuple):
            parts = [shown(part) for part in value]
            return Fields(*parts) if isinstance(value, Fields) else tuple(parts) if isinstance(value, tuple) else parts
        return value

    sampler = GlobalBatchSampler(10, 8, rank=2, world_size=4)
    loader = DataLoader(Counted(), batch_sampler=sampler, collate_fn=collate, num_workers=workers)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        (_, warned), (empty, _) = [(shown(batch), len(caught)) for batch in loader]
        list(loader)
    if "tensor" in expected or "cannot" in expected:
        assert empty is None
        [warning] = caught
        assert warned == 1, "with the first batch"
        assert expected in str(warning.message)
        assert "if batch is None:\n        model.sync_gradients()\n" in str(warning.message)
    else:
        assert str(empty) == expected
        assert not caught


def test_the_template_sample_is_loaded_once_without_changing_random_streams() -> None:
    data = Counted()
    sampler = GlobalBatchSampler(data, 8, shuffle=False, rank=2, world_size=4)
    loader, alone = DataLoader(data, batch_sampler=sampler), DataLoader(Counted(), 8)
    before = torch.get_rng_state()
    passes = [list(loader), list(loader)]
    assert torch.equal(before, torch.get_rng_state())
    assert data.loaded == {4: 2, 5: 2, 9: 1}
    for number, (first, last) in enumerate(passes):
        assert last.shape == (0, 1, 3)
        twin = DataLoader(Counted(), batch_sampler=GlobalBatchSampler(10, 8, shuffle=False, rank=2, world_size=4))
        twin.progress.set_epoch(number)
        assert torch.equal(first, next(iter(twin)))
    assert len(alone) == 2
