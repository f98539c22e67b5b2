"""``paceline explain same-bits``: the tree that is drawn is the tree in which the library sums."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor, nn

import paceline
from paceline.core.world import World
from paceline.data import DataLoader
from paceline.tools.explain.slices import expression, steps
from ranks import Pools


def evaluated(text: str, values: Tensor) -> Tensor:
    """The value of an expression of slices, with float32 in place of the numbers."""
    return eval(re.sub(r"\d+", lambda found: f"values[{found[0]}]", text), {"values": values})


def gradients(world: World, slices: int, values: Tensor) -> Tensor:
    """The gradient with virtual ranks, of slices whose gradients are `values`, times their number."""
    layer = nn.Linear(1, 1, bias=False)
    model = paceline.DistributedDataParallel(layer, virtual_ranks=slices)
    for x in paceline.accumulate(model, DataLoader(values.unsqueeze(1), slices)):
        model(x).sum().backward()
    assert layer.weight.grad is not None
    return layer.weight.grad.squeeze() * slices


def test_the_library_sums_in_the_tree_that_is_written_below_the_picture(pools: Pools) -> None:
    slices, differs = 8, 0
    for seed in range(3):
        values = torch.randn(slices, generator=torch.Generator().manual_seed(seed))
        tree = evaluated(expression(0, slices), values)
        for size in (1, 2):
            assert [float(each) for each in pools.run(size, gradients, slices, values)] == [float(tree)] * size
        differs += float(evaluated(" + ".join(map(str, range(slices))), values)) != float(tree)
    assert differs  # an order of its own is another sum


@pytest.mark.parametrize("slices", [16])
@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_every_number_of_ranks_makes_each_sum_of_the_tree_once(slices: int, ranks: int) -> None:
    made = [each for step in steps(slices, ranks) for each in step.made]
    want = [(first, 2**power) for power in range(slices.bit_length()) for first in range(0, slices, 2**power)]
    assert sorted((each.first, each.size) for each in made) == sorted(want)
    share = slices // ranks
    assert all((each.rank is None) == (each.size > share) for each in made)
    assert all(each.rank in (None, each.first // share) for each in made)
