from __future__ import annotations

import gc
from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from device_watch import queued_operations
from insides import LOOKS, Ledger, StepGuard, capacities, tensors_in
from paceline.errors import UsageError


@pytest.mark.parametrize("weight", [-1, float("nan"), float("inf")])
def test_weight_must_be_finite_and_nonnegative(weight: float) -> None:
    with pytest.raises(UsageError, match=r"model\.weight\(\) takes a finite number >= 0"), Ledger().weigh(weight):
        pass


def test_only_optimizers_of_the_model_count() -> None:
    ledger, ours, other = Ledger(), torch.zeros(1, requires_grad=True), torch.zeros(1, requires_grad=True)
    guard = StepGuard([ours], ledger, lambda: None)
    for parameters in (
        [ours],
        [other],
        [{"params": [other]}, {"params": [ours]}],
        [{"params": []}, {"params": [ours]}],
    ):
        torch.optim.SGD(parameters, lr=0.1).step()
    assert ledger.status.optimizer_steps == 3
    del guard


def test_each_optimizer_may_step_once_per_synchronization() -> None:
    ledger, ours = Ledger(), torch.zeros(1, requires_grad=True)
    guard = StepGuard([ours], ledger, lambda: "weight")
    first, second = torch.optim.SGD([ours], lr=0.1), torch.optim.SGD([ours], lr=0.1)
    ledger.synchronized()
    first.step()
    second.step()
    with pytest.raises(UsageError, match="'weight' that the wrapper has not averaged"):
        first.step()
    del guard
    gc.collect()
    first.step()


Pair = namedtuple("Pair", "left right")


@dataclass
class Output:
    loss: Any
    rest: Any = None


class Plain:
    def __init__(self, value: Any) -> None:
        self.value = value


ONE, TWO = torch.ones(1), torch.zeros(2)


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        (ONE, [ONE]),
        ((ONE, [TWO]), [ONE, TWO]),
        ({"a": ONE, "b": {"c": (TWO,)}}, [ONE, TWO]),
        (OrderedDict(a=ONE), [ONE]),
        (Pair(ONE, TWO), [ONE, TWO]),
        (Output(ONE, [Output(TWO)]), [ONE, TWO]),
        (Plain({"x": ONE}), [ONE]),
        ({frozenset([1]): {ONE}}, [ONE]),
        ((None, 3, "text", torch.float32, Output), []),
        (torch.nn.Linear(1, 1), []),
    ],
)
def test_tensors_are_found_in_every_kind_of_output(output: Any, expected: list[torch.Tensor]) -> None:
    assert sorted(map(id, tensors_in(output))) == sorted(map(id, expected))


MIB = 2**20


@pytest.mark.parametrize(
    ("cap", "caps", "expected"),
    [
        (None, None,          (MIB, 25 * MIB)),
        (5,    None,          (MIB, 5 * MIB)),
        (0.5,  None,          (MIB // 2, MIB // 2)),
        (1e-9, None,          (1, 1)),
        (None, [1, 2.5],      (MIB, 5 * MIB // 2)),
        (None, [],            (MIB, 25 * MIB)),
    ],
)  # fmt: skip
def test_capacities(cap: Any, caps: Any, expected: tuple[int, ...]) -> None:
    assert capacities(cap, caps) == expected


@pytest.mark.parametrize(("cap", "caps"), [(0, None), (-1, None), (float("nan"), None), (float("inf"), None)])
def test_bucket_capacity_must_be_positive(cap: Any, caps: Any) -> None:
    with pytest.raises(UsageError, match=rf"a bucket's capacity must be a number of MiB > 0, not {cap!r}"):
        capacities(cap, caps)


def test_invalid_gpu_weight_is_refused_when_the_rank_reports() -> None:
    ledger = Ledger()
    for _ in range(LOOKS):  # first steps check each weight for a mean loss
        with ledger.weigh(1):
            ledger.backward_began()
    with queued_operations(), ledger.weigh(torch.tensor(float("nan"))):
        ledger.backward_began()
    with pytest.raises(UsageError, match="finite number >= 0"):
        ledger.report(1)
