"""Global batches split by cost: the same batches as in one process, and less waiting."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from paceline.data import DataLoader, GlobalBatchSampler
from paceline.data.balance import split_by_cost, split_by_padded_cost
from paceline.errors import UsageError
from real_data import real_data

costs_of_a_batch = st.lists(st.one_of(st.integers(0, 50), st.floats(0, 50)), max_size=24)
speeds = st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=8).map(tuple)


def padded_cost(costs: list[float], share: list[int]) -> float:
    return len(share) * max((costs[place] for place in share), default=0.0)


def summed_cost(costs: list[float], share: list[int]) -> float:
    return sum(costs[place] for place in share)


SPLITS = {"summed": (split_by_cost, summed_cost), "padded": (split_by_padded_cost, padded_cost)}
splits = pytest.mark.parametrize(("split", "cost_of"), SPLITS.values(), ids=SPLITS)


@splits
@given(costs_of_a_batch, st.integers(1, 6), st.integers(0, 3), st.none() | speeds)
@example([0, 1.9e-73], 1, 1, None)
# With such a tiny cost, an excess load was converted to -inf samples.
@example([1.0, 1.0, 1.0, 5e-324], 4, 2, (1.0, 28.0, 55.0, 14.0))
def test_every_sample_is_in_one_share_and_no_share_is_needlessly_empty(
    split: Any, cost_of: Any, costs: list[float], ranks: int, seed: int, by: tuple[float, ...] | None
) -> None:
    ranks = ranks if by is None else len(by)
    earlier_loads = [7.0 * ((seed * rank) % 5) for rank in range(ranks)] if seed else None
    shares, loads = split(costs, ranks, earlier_loads, by)
    assert sorted(place for share in shares for place in share) == list(range(len(costs)))
    assert all(share == sorted(share) for share in shares)
    assert all(shares) or len(costs) < ranks
    begun = earlier_loads or [0.0] * ranks
    expected = [load + cost_of(costs, share) for load, share in zip(begun, shares, strict=True)]
    assert loads == pytest.approx(expected)


def best_load(costs: list[float], ranks: int, cost_of: Any) -> float:
    """Return the largest load of the optimal split."""
    return min(
        max(cost_of(costs, [place for place, owner in enumerate(owners) if owner == rank]) for rank in range(ranks))
        for owners in product(range(ranks), repeat=len(costs))
    )


@given(st.lists(st.integers(0, 20), min_size=1, max_size=7), st.integers(1, 3))
def test_the_largest_load_keeps_grahams_bound(costs: list[float], ranks: int) -> None:
    _, loads = split_by_cost(costs, ranks)
    best = best_load(costs, ranks, summed_cost)
    assert max(loads) <= (4 / 3 - 1 / (3 * ranks)) * best + 1e-9


@given(st.integers(1, 40), st.integers(1, 9), st.integers(1, 5), st.integers(1, 4), st.booleans(), st.booleans())
def test_global_batches_do_not_change(
    size: int, batch: int, ranks: int, window: int, drop_last: bool, padded: bool
) -> None:
    if drop_last and size < batch:
        return
    costs = [(7 * index) % 11 for index in range(size)]
    options: dict[str, Any] = {"drop_last": drop_last, "seed": 3}
    plain = list(GlobalBatchSampler(size, batch, rank=0, world_size=1, **options))
    samplers = [
        GlobalBatchSampler(
            size, batch, cost=costs, padded=padded, accumulate=window, rank=rank, world_size=ranks, **options
        )
        for rank in range(ranks)
    ]
    for whole, *slices in zip(plain, *samplers, strict=True):
        assert sorted(whole) == sorted(index for part in slices for index in part)
        assert all([index for index in whole if index in part] == part for part in slices), "samples were reordered"


@pytest.mark.parametrize(("consumed", "padded"), [(1, False), (2, True), (5, False)])
def test_resuming_within_a_window_splits_like_the_whole_pass(consumed: int, padded: bool) -> None:
    def sampler() -> GlobalBatchSampler:
        costs = torch.arange(40) % 7
        return GlobalBatchSampler(40, 6, cost=costs, padded=padded, accumulate=3, rank=1, world_size=3)

    whole, resumed = sampler(), sampler()
    batches = list(whole)
    resumed.set_position(consumed)
    assert list(resumed) == batches[consumed:]


def mrpc_lengths() -> list[int]:
    lines = real_data("mrpc", "msr_paraphrase_train.txt").read_text(encoding="utf-8-sig").splitlines()[1:]
    return [len(" ".join(line.split("\t")[3:]).split()) for line in lines]


def waiting(samplers: list[GlobalBatchSampler], lengths: list[int], window: int) -> float:
    """Return how much all ranks wait for the slowest one in an epoch, measured in words."""
    total, loads = 0, [0] * len(samplers)
    slices = list(zip(*samplers, strict=True))
    for number, parts in enumerate(slices, 1):
        loads = [load + sum(lengths[index] for index in part) for load, part in zip(loads, parts, strict=True)]
        if number % window == 0 or number == len(slices):
            total += sum(max(loads) - load for load in loads)
            loads = [0] * len(samplers)
    return total


@pytest.mark.parametrize(("ranks", "batch", "window"), [(2, 16, 1), (4, 8, 4)])
def test_splitting_by_cost_removes_most_waiting_on_real_sentences(ranks: int, batch: int, window: int) -> None:
    lengths = mrpc_lengths()
    even, balanced = (
        waiting(
            [
                GlobalBatchSampler(lengths, batch, rank=rank, world_size=ranks, **options)  # type: ignore[arg-type]
                for rank in range(ranks)
            ],
            lengths,
            window,
        )
        for options in ({}, {"cost": lengths, "accumulate": window})
    )
    assert balanced <= 0.3 * even, f"removed only {1 - balanced / even:.0%}"


@pytest.mark.parametrize(
    ("cost", "message"),
    [
        ([1.0, 2.0], "cost has shape (2,) for 3 samples"),
        ([1.0, float("nan"), 2.0], "the cost of sample 1 is nan"),
        (lambda sample: float("inf"), "the cost of sample 0 is inf"),
        (lambda sample: "long", "cost must be one number for each sample"),
        (lambda sample: [1, 2], "cost has shape (3, 2) for 3 samples"),
    ],
)
def test_invalid_costs_are_refused(cost: Any, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        DataLoader(["a", "b", "c"], 2, cost=cost)
    assert message in str(caught.value)


def test_costs_need_a_dataset_and_windows_need_costs() -> None:
    with pytest.raises(UsageError, match="got a number of samples"):
        GlobalBatchSampler(3, 2, cost=len)
    with pytest.raises(UsageError, match="give cost, or leave accumulate out"):
        GlobalBatchSampler(3, 2, accumulate=2)
    with pytest.raises(UsageError, match="padded is for slices of equal cost"):
        DataLoader([1, 2], 2, padded=True)
    with pytest.raises(UsageError, match="need batch_size"):
        DataLoader([1, 2], batch_sampler=GlobalBatchSampler(2, 1), padded=True)
    with pytest.raises(UsageError, match="need batch_size"):
        DataLoader([1, 2], batch_sampler=GlobalBatchSampler(2, 1), cost=[1, 2])
