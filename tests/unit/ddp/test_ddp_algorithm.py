"""DistributedDataParallel(algorithm=...) sums the buckets by an algorithm over send and receive."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

from deep import TINY
from paceline.core.processes.world import World
from paceline.ddp import DistributedDataParallel
from paceline.errors import DesyncError, UsageError
from twins import Case, Mixed, Odd, Parts, Pools, train_beside_twin

ALWAYS = Case(Parts, "a part twice", (12, 7, 2))
CASES = {
    "ring": [
        Case(Parts, "unused on all in odd steps", (12, 7), 2, "backward", False),
        Case(partial(Parts, checkpointing="reentrant"), "other parts on other ranks", (12, 7)),
    ],
    "tree": [Case(Mixed, "all parts", (12, 1), 2, "sync_gradients", rtol=5e-2)],
    "halving-doubling": [Case(Odd, "all parts", (12, 1))],
    "hierarchical": [Case(Parts, "all parts", (12, 7), options={"reduce_dtype": torch.float16}, rtol=0.02)],
}


def equals_one_process(world: World, algorithm: str) -> None:
    options = {"algorithm": algorithm, "bucket_cap_mb": TINY}
    for case in (ALWAYS, *CASES[algorithm]):
        train_beside_twin(world, replace(case, options={**case.options, **options}))


@pytest.mark.parametrize(("algorithm", "size"), [*((name, 3) for name in CASES), ("ring", 1)])
def test_ranks_equal_one_process(pools: Pools, size: int, algorithm: str) -> None:
    pools.run(size, equals_one_process, algorithm)


def differing(world: World) -> None:
    with pytest.raises(UsageError, match=r"algorithm='rings': give one of ring, tree, halving-doubling, hierarchical"):
        DistributedDataParallel(nn.Linear(3, 3), algorithm="rings")  # type: ignore[arg-type]
    model = DistributedDataParallel(nn.Linear(3, 3), algorithm=("ring", "tree")[world.rank])
    with pytest.raises(
        DesyncError, match=r"different algorithms: ring_all_reduce on rank 0, tree_all_reduce on rank 1"
    ):
        model(torch.ones(2, 3)).sum().backward()


def test_an_unknown_algorithm_and_different_ones_are_refused_by_name(pools: Pools) -> None:
    pools.run(2, differing)
