"""Promise: weights have the same bits on every rank after any number of steps."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from drawn import draws
from insides import weights_sha256
from paceline import World
from paceline.ddp import DistributedDataParallel
from twins import INPUTS, OUTPUTS, PATTERNS, Case, Parts, Pools, global_batch, reentrant, summed_loss, train_slices

TINY = 1e-4


class Branches(nn.Module):
    """Layers that run in the order given by the caller, which determines the order in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(INPUTS, INPUTS) for _ in range(4)])
        self.head = nn.Linear(INPUTS, OUTPUTS)

    def forward(self, x: Tensor, order: list[int]) -> Tensor:
        for index in order:
            x = self.layers[index](x).tanh()
        return self.head(x)


def digests(world: World, case: Case, steps: int) -> tuple[list[str], list[list[str]], list[list[str]]]:
    """Train on local data; return digests of the weights after every step, and the first and last layout."""
    torch.manual_seed(world.rank)  # initial weights differ; rank 0's are broadcast
    model = DistributedDataParallel(case.build().float(), unused_parameters="allow", **case.options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    first, seen = model.bucket_layout(), []
    for step in range(steps):
        micros = []
        for micro in range(case.micros):
            x, y = global_batch(997 * world.rank + 31 * micro + step, (world.rank + step + micro) % 4)
            micros.append((micro, x.float(), y.float()))
        train_slices(model, case, micros, lambda micro, step=step: PATTERNS[case.pattern](world.rank, micro, step))
        optimizer.step()
        optimizer.zero_grad(set_to_none=case.set_to_none)
        seen.append(weights_sha256(model))
    return seen, first, model.bucket_layout()


@draws(12, shrinks=False)
@given(
    size=st.sampled_from([2, 3]),
    case=st.builds(
        Case,
        build=st.sampled_from([Parts, reentrant]),
        pattern=st.sampled_from(list(PATTERNS)),
        micros=st.integers(1, 3),
        window=st.sampled_from(["both", "backward", "accumulate", "sync_gradients"]),
        set_to_none=st.booleans(),
        options=st.fixed_dictionaries({"bucket_cap_mb": st.sampled_from([TINY, 25.0])}),
    ),
)
def test_replicas_are_identical_after_every_step(pools: Pools, size: int, case: Case) -> None:
    seen, first, last = zip(*pools.run(size, digests, case, 4), strict=True)
    assert len(set(map(tuple, seen))) == 1
    assert all(layout == last[0] for layout in last)
    assert all(layout == first[0] for layout in first)


def test_the_number_of_buckets_follows_their_capacity(pools: Pools) -> None:
    case = Case(Parts)
    for cap, least, most in ((TINY, 4, 8), (25.0, 1, 1)):
        (_, first, last), _ = pools.run(2, digests, replace(case, options={"bucket_cap_mb": cap}), 2)
        assert least <= len(first) <= most
        assert least <= len(last) <= most
        names = sorted(name for name, _ in Parts().named_parameters())
        assert sorted(chain(*first)) == sorted(chain(*last)) == names


def train_in_rank_dependent_order(world: World, restored: list[list[str]] | None) -> dict[str, Any]:
    torch.manual_seed(0)
    model = DistributedDataParallel(Branches(), bucket_cap_mb=TINY, unused_parameters="allow")
    if restored is not None:
        model.load_bucket_layout(restored)
    layouts, seen = [model.bucket_layout()], []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        order = [2, 0, 3, 1] if world.rank == 0 else [3, 1, 0, 2]
        if step % 2:
            order = order[::-1]
        x, y = global_batch(10 * world.rank + step, 3)
        summed_loss(model(x.float(), order), y.float()).backward()
        optimizer.step()
        optimizer.zero_grad()
        layouts.append(model.bucket_layout())
        seen.append(weights_sha256(model))
    return {"layouts": layouts, "seen": seen}


def test_rank_0_decides_the_bucket_order_for_all_ranks(pools: Pools) -> None:
    results = pools.run(3, train_in_rank_dependent_order, None)
    assert all(result == results[0] for result in results)
    first, rebuilt, *later = results[0]["layouts"]
    assert first != rebuilt
    assert all(layout == rebuilt for layout in later)
    # Rank 0's first forward ran layers 2, 0, 3, 1 and the head, so their gradients arrive in reverse order.
    arrived = [name.rpartition(".")[0] for names in rebuilt for name in names]
    assert list(dict.fromkeys(arrived)) == ["head", "layers.1", "layers.3", "layers.0", "layers.2"]


def test_restored_layout_stays_and_gives_the_same_weights(pools: Pools) -> None:
    saved = pools.run(3, train_in_rank_dependent_order, None)[0]
    layout = saved["layouts"][-1]
    results = pools.run(3, train_in_rank_dependent_order, layout)
    assert all(result["layouts"] == [layout] * 5 for result in results)
    assert len({tuple(result["seen"]) for result in results}) == 1
