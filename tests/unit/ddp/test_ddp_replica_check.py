"""Drifting replicas are detected within the interval and reported with step, tensor and rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from paceline.core.digests import PIECE, quick_digest
from paceline.core.world import World
from paceline.ddp import DistributedDataParallel
from paceline.ddp.replica_check import drift
from paceline.errors import ReplicaMismatch, UsageError
from twins import Pools

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.complex64]


# -- the digest --------------------------------------------------------------------------------------------------------


@given(st.sampled_from(DTYPES), st.sampled_from([1, 2, 3, 7, 8, 1000, 2 * PIECE + 5]), st.data())
def test_one_flipped_bit_always_changes_the_digest(dtype: torch.dtype, count: int, data: Any) -> None:
    tensor = torch.arange(count).to(dtype)
    before = int(quick_digest(tensor))
    bytes_ = torch.view_as_real(tensor).view(-1).view(torch.uint8) if dtype.is_complex else tensor.view(torch.uint8)
    at = data.draw(st.integers(0, len(bytes_) - 1))
    bytes_[at] ^= 1 << data.draw(st.integers(0, 7))
    assert int(quick_digest(tensor)) != before


@given(st.integers(2, 5000), st.data())
def test_swapping_values_changes_the_digest(count: int, data: Any) -> None:
    powers = 2.0 ** (torch.arange(count) % 200 - 100)  # differ only in high bits
    first, second = data.draw(st.tuples(*[st.integers(0, count - 1)] * 2))
    swapped = powers.clone()
    swapped[[first, second]] = powers[[second, first]]
    same = bool(torch.equal(powers, swapped))
    assert (int(quick_digest(powers)) == int(quick_digest(swapped))) == same


def test_digest_depends_only_on_the_elements() -> None:
    tensor = torch.randn(6, 5)
    digest = int(quick_digest(tensor))
    assert int(quick_digest(tensor.t().contiguous().t())) == digest
    shifted = torch.randn(31)
    shifted[1:] = tensor.view(-1)
    assert int(quick_digest(shifted[1:].view(6, 5))) == digest  # not aligned to a word
    assert int(quick_digest(torch.zeros(0))) == 0


def test_majority_is_assumed_correct() -> None:
    names = ["a", "b"]
    assert drift(names, [[2, 3]] * 3, 7) is None
    message = drift(names, [[5, 3], [2, 3], [2, 3]], 7)
    assert message is not None
    assert "after optimizer step 7, parameter 'a' has different bits on rank 0 than on rank 1" in message
    both = drift(names, [[2, 3], [6, 4]], 7)
    assert both is not None
    assert "parameter 'a' (and 1 more) has different bits on rank 1 than on rank 0" in both


# -- ranks -------------------------------------------------------------------------------------------------------------


def train(world: World, every: int, change: str, rank: int) -> tuple[str, int]:
    """Train 10 steps, with a change on one rank before the 4th; return the error and its step."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    model = DistributedDataParallel(module, check_replicas_every=every, forward_sync_buffers=change != "statistics")
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for step in range(10):
        if step == 3 and world.rank == rank:
            corrupt(change, module, optimizer)
        x = torch.randn(4, 3, generator=torch.Generator().manual_seed(10 * step + world.rank))
        optimizer.zero_grad()
        try:
            model(x).sin().sum().backward()
        except ReplicaMismatch as error:
            return str(error), step
        optimizer.step()
    return "", step


def corrupt(change: str, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    if "added" in change:
        module.register_parameter("added", nn.Parameter(torch.ones(2), requires_grad=False))
    if "bit" in change:
        module[0].weight.data.view(torch.int32)[1, 2] ^= 1
    elif change == "swap":
        module[2].weight.data[:] = module[2].weight.data.flip(0)
    elif change == "state":
        optimizer.state[module[2].bias]["exp_avg"].view(torch.int32)[0] ^= 1 << 22  # the effect of a low bit would fade


@pytest.mark.parametrize(
    ("change", "parameter", "every", "detected"),
    [
        ("bit", "parameter '0.weight'", 1, 3),
        ("added, bit", "parameter '0.weight'", 1, 3),
        ("swap", "parameter '2.weight'", 2, 4),
        ("state", "parameter '2.bias'", 5, 5),
    ],
)
def test_a_flipped_bit_is_found_within_the_interval_on_every_rank(
    pools: Pools, change: str, parameter: str, every: int, detected: int
) -> None:
    for message, step in pools.run(2, train, every, change, 1):
        assert step == detected
        assert parameter in message
        assert f"after optimizer step {detected}" in message
        assert "on rank 1 than on rank 0" in message


def test_odd_one_out_of_three_ranks_is_named(pools: Pools) -> None:
    for message, _ in pools.run(3, train, 1, "bit", 0):
        assert "has different bits on rank 0 than on rank 1" in message


@pytest.mark.parametrize("change", ["nothing", "statistics", "added"])
def test_no_false_alarm(pools: Pools, change: str) -> None:
    """Running statistics differ without a broadcast; a frozen parameter may exist on only one rank."""
    assert pools.run(2, train, 2, change, 1) == [("", 9)] * 2


def wrap_with_invalid_intervals(world: World) -> None:
    for value in (0, -1, 1.5, True):
        with pytest.raises(UsageError, match="check_replicas_every must be"):
            DistributedDataParallel(nn.Linear(1, 1), check_replicas_every=value)


def test_check_interval_must_be_a_positive_integer(pools: Pools) -> None:
    pools.run(1, wrap_with_invalid_intervals)
