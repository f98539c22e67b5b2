"""``paceline explain same-bits``: the library sums in the drawn tree."""

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
    """Evaluate an expression of slices in float32."""
    return eval(re.sub(r"\d+", lambda found: f"values[{found[0]}]", text), {"values": values})


def gradients(world: World, slices: int, values: Tensor) -> Tensor:
    """Return the gradient with virtual ranks for slices with gradients `values`, times the number of slices."""
    layer = nn.Linear(1, 1, bias=False)
    model = paceline.DistributedDataParallel(layer, virtual_ranks=slices)
    for x in paceline.accumulate(model, DataLoader(values.unsqueeze(1), slices)):
        model(x).sum().backward()
    assert layer.weight.grad is not None
    return layer.weight.grad.squeeze() * slices


def test_library_sums_in_the_tree_below_the_picture(pools: Pools) -> None:
    slices, differs = 8, 0
    for seed in range(3):
        values = torch.randn(slices, generator=torch.Generator().manual_seed(seed))
        tree = evaluated(expression(0, slices), values)
        for size in (1, 2):
            assert [float(result) for result in pools.run(size, gradients, slices, values)] == [float(tree)] * size
        differs += float(evaluated(" + ".join(map(str, range(slices))), values)) != float(tree)
    assert differs  # another order gives another sum


@pytest.mark.parametrize("slices", [16])
@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_ranks_compute_each_sum_of_the_tree_once(slices: int, ranks: int) -> None:
    made = [node for step in steps(slices, ranks) for node in step.made]
    want = [(first, 2**power) for power in range(slices.bit_length()) for first in range(0, slices, 2**power)]
    assert sorted((node.first, node.size) for node in made) == sorted(want)
    share = slices // ranks
    assert all((node.rank is None) == (node.size > share) for node in made)
    assert all(node.rank in (None, node.first // share) for node in made)
