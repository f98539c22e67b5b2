"""DistributedDataParallel(algorithm=...) sums the buckets by an algorithm over send and receive."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from deep import TINY
from paceline.core.processes.world import World
from paceline.ddp import DistributedDataParallel
from paceline.ddp.options.config import ALGORITHMS
from paceline.errors import DesyncError, UsageError
from twins import Case, Mixed, Odd, Parts, Pools, same_gradients, train_beside_twin


def equals_one_process(world: World, algorithm: str) -> None:
    options = {"algorithm": algorithm, "bucket_cap_mb": TINY}
    for case in [
        Case(Parts, "a part twice", (12, 7, 2), options=options),
        Case(Parts, "unused on all in odd steps", (12, 7, 2), 2, "backward", False, options=options),
        Case(Mixed, "all parts", (12, 1), 2, "sync_gradients", options=options, rtol=5e-2),
        Case(Odd, "all parts", (12, 1), options=options),
        Case(Parts, "all parts", (12, 7), options={**options, "reduce_dtype": torch.float16}, rtol=0.02),
        Case(partial(Parts, checkpointing="reentrant"), "other parts on other ranks", (12, 7), options=options),
    ]:
        train_beside_twin(world, case)


@pytest.mark.parametrize(("algorithm", "size"), [*((name, 3) for name in ALGORITHMS), ("ring", 1)])
def test_ranks_equal_one_process(pools: Pools, size: int, algorithm: str) -> None:
    pools.run(size, equals_one_process, algorithm)


def beside_the_default(world: World, algorithm: str, backend: str) -> None:
    group = dist.new_group(backend=backend)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(20, 30), nn.Tanh(), nn.Linear(30, 5))
    options: dict[str, Any] = {"process_group": group, "bucket_cap_mb": 0.001}
    plain = DistributedDataParallel(copy.deepcopy(net), **options)
    ours = DistributedDataParallel(net, algorithm=algorithm, **options)
    copied = copy.deepcopy(ours)
    for _ in range(3):
        x = torch.randn(8, 20, generator=torch.Generator().manual_seed(world.rank))
        for model in (plain, ours, copied):
            model.zero_grad()
            model(x).square().mean().backward()
        same_gradients(ours.module, plain.module, 1e-5)
        same_gradients(copied.module, ours.module, 0.0)  # a copy keeps the algorithm
    flat = torch.cat([p.grad.view(-1) for p in ours.parameters()])
    everyone = [torch.empty_like(flat) for _ in range(world.size)]
    dist.all_gather(everyone, flat)
    assert all(torch.equal(one, flat) for one in everyone)


@pytest.mark.slow
def test_gradients_equal_the_default_and_are_the_same_bits_on_all_ranks(pools: Pools) -> None:
    for backend, algorithm in zip(("gloo", "paceline", "gloo", "paceline"), ALGORITHMS, strict=True):
        pools.run(4, beside_the_default, algorithm, backend)


def differing(world: World) -> None:
    model = DistributedDataParallel(nn.Linear(3, 3), algorithm=("ring", "tree")[world.rank])
    with pytest.raises(
        DesyncError, match=r"different algorithms: ring_all_reduce on rank 0, tree_all_reduce on rank 1"
    ):
        model(torch.ones(2, 3)).sum().backward()


def test_ranks_that_were_given_different_algorithms_say_so(pools: Pools) -> None:
    pools.run(2, differing)


def unknown(world: World) -> None:
    with pytest.raises(UsageError, match=r"algorithm='rings': give one of ring, tree, halving-doubling, hierarchical"):
        DistributedDataParallel(nn.Linear(3, 3), algorithm="rings")  # type: ignore[arg-type]


def test_an_unknown_algorithm_is_refused_by_name(pools: Pools) -> None:
    pools.run(1, unknown)
