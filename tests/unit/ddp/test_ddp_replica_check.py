"""Replicas that drift apart are noticed within the interval, by step, tensor and rank."""

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
def test_values_that_change_places_change_the_digest(count: int, data: Any) -> None:
    powers = 2.0 ** (torch.arange(count) % 200 - 100)  # these differ in high bits alone
    one, other = data.draw(st.tuples(*[st.integers(0, count - 1)] * 2))
    swapped = powers.clone()
    swapped[[one, other]] = powers[[other, one]]
    same = bool(torch.equal(powers, swapped))
    assert (int(quick_digest(powers)) == int(quick_digest(swapped))) == same


def test_only_the_elements_count() -> None:
    tensor = torch.randn(6, 5)
    digest = int(quick_digest(tensor))
    assert int(quick_digest(tensor.t().contiguous().t())) == digest
    shifted = torch.randn(31)
    shifted[1:] = tensor.view(-1)
    assert int(quick_digest(shifted[1:].view(6, 5))) == digest  # which does not lie at a multiple of a word
    assert int(quick_digest(torch.zeros(0))) == 0


def test_what_most_ranks_hold_is_taken_for_right() -> None:
    names = ["a", "b"]
    assert drift(names, [[2, 3]] * 3, 7) is None
    said = drift(names, [[5, 3], [2, 3], [2, 3]], 7)
    assert said is not None
    assert "after optimizer step 7, parameter 'a' has different bits on rank 0 than on rank 1" in said
    both = drift(names, [[2, 3], [6, 4]], 7)
    assert both is not None
    assert "parameter 'a' (and 1 more) has different bits on rank 1 than on rank 0" in both


# -- ranks -------------------------------------------------------------------------------------------------------------


def train(world: World, every: int, change: str, rank: int) -> tuple[str, int]:
    """10 steps; before the 4th, something changes on one rank. Returns what was raised, and in which step."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    model = DistributedDataParallel(module, check_replicas_every=every, forward_sync_buffers=change != "statistics")
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for step in range(10):
        if step == 3 and world.rank == rank:
            strike(change, module, optimizer)
        x = torch.randn(4, 3, generator=torch.Generator().manual_seed(10 * step + world.rank))
        optimizer.zero_grad()
        try:
            model(x).sin().sum().backward()
        except ReplicaMismatch as error:
            return str(error), step
        optimizer.step()
    return "", step


def strike(change: str, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    if "added" in change:
        module.register_parameter("added", nn.Parameter(torch.ones(2), requires_grad=False))
    if "bit" in change:
        module[0].weight.data.view(torch.int32)[1, 2] ^= 1
    elif change == "swap":
        module[2].weight.data[:] = module[2].weight.data.flip(0)
    elif change == "state":
        optimizer.state[module[2].bias]["exp_avg"].view(torch.int32)[0] ^= 1 << 22  # a low bit would fade


@pytest.mark.parametrize(
    ("change", "said", "every", "found"),
    [
        ("bit", "parameter '0.weight'", 1, 3),
        ("added, bit", "parameter '0.weight'", 1, 3),
        ("swap", "parameter '2.weight'", 2, 4),
        ("state", "parameter '2.bias'", 5, 5),
    ],
)
def test_a_flipped_bit_is_found_within_the_interval_on_every_rank(
    pools: Pools, change: str, said: str, every: int, found: int
) -> None:
    for message, step in pools.run(2, train, every, change, 1):
        assert step == found
        assert said in message
        assert f"after optimizer step {found}" in message
        assert "on rank 1 than on rank 0" in message


def test_of_three_ranks_the_odd_one_is_named(pools: Pools) -> None:
    for message, _ in pools.run(3, train, 1, "bit", 0):
        assert "has different bits on rank 0 than on rank 1" in message


@pytest.mark.parametrize("change", ["nothing", "statistics", "added"])
def test_no_false_alarm(pools: Pools, change: str) -> None:
    """Running statistics that nobody broadcasts differ; a frozen parameter may exist on one rank only."""
    assert pools.run(2, train, 2, change, 1) == [("", 9)] * 2


def refused(world: World) -> None:
    for value in (0, -1, 1.5, True):
        with pytest.raises(UsageError, match="check_replicas_every must be"):
            DistributedDataParallel(nn.Linear(1, 1), check_replicas_every=value)


def test_an_interval_is_a_whole_number_above_zero(pools: Pools) -> None:
    pools.run(1, refused)
