"""Guarantees of docs/promises.md that no other file tests, and a check that the tests named in the docs exist.

The same check covers the faults in decision 59.
"""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import chaos
import torch
from torch import Tensor, nn

from paceline import World
from paceline.ddp import DistributedDataParallel, accumulate
from twins import INPUTS, OUTPUTS, Pools, global_batch, summed_loss

ROOT = Path(__file__).parents[2]


@cache
def names_of_tests() -> set[str]:
    files = [path for folder in ("unit", "property", "peers") for path in (ROOT / "tests" / folder).rglob("test_*.py")]
    return {node.name for path in files for node in ast.parse(path.read_text()).body if hasattr(node, "name")}


def test_tests_named_for_reported_problems_exist() -> None:
    rows = [
        line
        for line in (ROOT / "docs" / "decisions" / "0060-reported-problems-and-their-tests.md").read_text().splitlines()
        if line.startswith("| ")
    ][1:]
    assert len(rows) == 26
    for row in rows:
        named = re.findall(r"`(test_\w+)`", row)
        assert named or "gpu_check.py" in row, row
        assert names_of_tests().issuperset(named), f"{set(named) - names_of_tests()} in {row}"


def test_tests_and_chaos_cases_named_for_faults_exist() -> None:
    text = (ROOT / "docs" / "decisions" / "0059-faults-and-their-tests.md").read_text()
    rows = [line for line in text.splitlines() if line.startswith("| ")][1:]
    assert len(rows) == 39
    names = [case.name for case in chaos.cases()]
    for row in rows:
        tests, cases = re.findall(r"`(test_\w+)`", row), re.findall(r"`chaos: ([^`]+)`", row)
        assert tests or cases, row
        assert names_of_tests().issuperset(tests), f"{set(tests) - names_of_tests()} in {row}"
        assert all(any(name.startswith(case) for name in names) for case in cases), row


def linear() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(INPUTS, OUTPUTS, dtype=torch.float64)


def mine(world: World, step: int = 0) -> tuple[Tensor, Tensor]:
    x, y = global_batch(step, 3 * world.size)
    return x.tensor_split(world.size)[world.rank], y.tensor_split(world.size)[world.rank]


def train_with_schedule(world: World) -> list[float]:
    model = DistributedDataParallel(linear())
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
    rates = []
    for x, y in accumulate(model, [mine(world, step) for step in range(12)], every=2):
        summed_loss(model(x), y).backward()
        if model.do_sync:
            optimizer.step()
            scheduler.step()
            rates.append(scheduler.get_last_lr()[0])
    return rates


def test_a_schedule_counts_optimizer_steps_on_any_number_of_ranks(pools: Pools) -> None:
    for size in (1, 3):
        assert pools.run(size, train_with_schedule) == [[1.0, 0.5, 0.5, 0.25, 0.25, 0.125]] * size
