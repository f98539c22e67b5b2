"""Slice sizes by speed: how many samples each rank gets."""

from __future__ import annotations

import math
from itertools import product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drawn import draws
from paceline.data import DataLoader, GlobalBatchSampler
from paceline.data.balance import split_by_cost
from paceline.data.slices import shares_by_speed, slice_bounds
from paceline.errors import UsageError

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
        assert all(
            abs(share - quota) < 1 + 1e-9 for share, quota in zip(shares_by_speed(count, by), quotas, strict=True)
        )


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
    with pytest.raises(
        UsageError, match="a global batch of 3 samples cannot be cut by speed among 4 ranks; give a batch"
    ):
        GlobalBatchSampler(30, 3, speed=[1] * 4, rank=0, world_size=4)


def test_one_rank_takes_whole_batches() -> None:
    plain = list(DataLoader(list(range(30)), 7, shuffle=True))
    batches = list(DataLoader(list(range(30)), 7, shuffle=True, speed=[3]))
    assert [batch.tolist() for batch in batches] == [batch.tolist() for batch in plain]
