"""Unused parameters are named in one warning or in an error on every rank."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from insides import unused_message
from paceline import World
from paceline.ddp import DistributedDataParallel
from paceline.errors import UnusedParameterWarning, UsageError
from twins import Parts, Pools

ALL, A = frozenset("ab"), frozenset("a")


@pytest.mark.parametrize(
    ("without", "expected"),
    [
        ([[1, 1], [1, 1]], "2 parameters had no gradient in a synchronized backward: 'a', 'b.c' on every rank"),
        (
            [[0, 1], [1, 1]],
            "2 parameters had no gradient in a synchronized backward: 'a' on rank 1; 'b.c' on every rank",
        ),
        ([[0, 0], [1, 0]], "1 parameter had no gradient in a synchronized backward: 'b.c' on rank 0"),
        ([[0, 0], [0, 0]], None),
    ],
)
def test_message(without: list[list[int]], expected: str | None) -> None:
    assert unused_message(["a", "b.c"], without) == expected


def inputs() -> Tensor:
    return torch.ones(2, 5, dtype=torch.float64)


def train_and_record_warnings(world: World, options: dict[str, Any], steps: list[Any]) -> list[str]:
    """Return the warnings of steps that use the given parts on each rank; None means no data."""
    torch.manual_seed(0)
    model = DistributedDataParallel(Parts(), **options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for by_rank in steps:
            model.zero_grad()
            with model.no_sync():
                model(inputs(), A).sum().backward()  # no warning, because it is not synchronized
            model.zero_grad()
            parts = by_rank[world.rank]
            if parts is None:
                model.sync_gradients()
            else:
                model(inputs(), parts).sum().backward()
    assert all(warning.category is UnusedParameterWarning for warning in caught)
    return [str(warning.message) for warning in caught]


def test_rank_0_warns_about_each_parameter_once_by_name_and_rank(pools: Pools) -> None:
    first, second = pools.run(2, train_and_record_warnings, {}, [(ALL, None), (ALL, A), (A, A), (ALL, A)])
    assert second == []
    never, later = first
    assert "1 parameter had no gradient in a synchronized backward: 'never' on rank 0;" in never
    assert "'b.weight', 'b.bias' on rank 1;" in later
    assert "unused_parameters='allow'" in later


@pytest.mark.parametrize(
    "options",
    [
        {"unused_parameters": "allow"},
        {"find_unused_parameters": True},
        {"static_graph": True},
        {"skip_all_reduce_unused_params": True},
    ],
)
def test_no_warning_if_unused_parameters_are_expected(pools: Pools, options: dict[str, Any]) -> None:
    assert pools.run(2, train_and_record_warnings, options, [(A, ALL), (A, A)]) == [[], []]


def refused(world: World) -> list[str]:
    model = DistributedDataParallel(Parts(), unused_parameters="error")
    messages = []
    for step in range(2):
        model.zero_grad()
        with pytest.raises(UsageError) as caught:
            model(inputs(), A if world.rank == 1 else ALL).sum().backward()
        assert model.module.trunk.weight.grad is not None, step
        messages.append(str(caught.value))
    return messages


def test_error_names_unused_parameters_on_every_rank_each_time(pools: Pools) -> None:
    (first, again), (second, _) = pools.run(2, refused)
    assert first == second == again
    assert "'never' on every rank" in first
    assert "'b.weight', 'b.bias' on rank 1" in first


def frozen(world: World) -> None:
    model = DistributedDataParallel(nn.Sequential(nn.Linear(5, 2), nn.Linear(2, 1)).double(), unused_parameters="error")
    model.module[0].requires_grad_(False)
    model(inputs()).sum().backward()


def test_a_frozen_parameter_is_not_unused(pools: Pools) -> None:
    pools.run(2, frozen)
