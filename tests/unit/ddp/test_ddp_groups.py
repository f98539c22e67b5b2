"""Wrappers over subgroups: only members take part, resources are released, and a destroyed group ends its wrapper."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import paceline
from models import chain
from paceline.comm.own_group import open_own_group
from paceline.core.world import World
from paceline.ddp import DistributedDataParallel
from paceline.errors import CommunicationError
from ranks import run_ranks
from twins import Pools


def net() -> nn.Module:
    return chain(3, 4, 2, dtype=torch.float64)


def step(group: dist.ProcessGroup | None, model: DistributedDataParallel | None = None) -> DistributedDataParallel:
    """Run a backward over `group` and compare it with one process on the whole batch."""
    model = model or DistributedDataParallel(net(), process_group=group)
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    batch = torch.randn(2 * size, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    twin = net()
    twin(batch).square().mean().backward()
    model.zero_grad()
    model(batch[2 * rank : 2 * rank + 2]).square().mean().backward()
    for mine, other in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad)
    return model


def step_on_each_group(world: World, lists: Sequence[list[int]]) -> None:
    """Wrap and step on each group that this rank belongs to; then step again in reverse order."""
    groups = [dist.new_group(ranks) for ranks in lists]
    mine = [group for group, ranks in zip(groups, lists, strict=True) if world.rank in ranks]
    models = [step(group) for group in mine]
    for group, model in reversed(list(zip(mine, models, strict=True))):
        step(group, model)


@pytest.mark.parametrize(
    ("ranks", "lists"),
    [("gloo", [[0, 1], [2, 3], [0, 2]]), ("pools", [[0, 3], [0, 1, 2], [1, 2, 3], [0, 1, 2, 3]])],
    ids=["pairs and leaders", "overlapping"],
)
def test_ranks_in_different_numbers_of_groups_find_each_other(
    request: pytest.FixtureRequest, ranks: str, lists: list[list[int]]
) -> None:
    # Torch names a subgroup after the number of groups that the process knows, so two ranks, if one belongs to
    # another group as well, waited for each other under different names.
    request.getfixturevalue(ranks).run(4, step_on_each_group, lists)


def unsorted_mesh(world: World) -> None:
    mesh = DeviceMesh("cpu", [[3, 1], [2, 0]], mesh_dim_names=("a", "b"))
    for name in ("a", "b"):
        step(mesh[name].get_group())


def test_mesh_of_unsorted_ranks_keeps_its_order(pools: Pools) -> None:
    pools.run(4, unsorted_mesh)


def local_groups_beside_wrappers(world: World) -> None:
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    kept = step(pairs[0]) if world.rank < 2 else None
    # Torch names this group after its ranks and the number of known groups, among which a wrapper must not count.
    if world.rank in (1, 2):
        step(dist.new_group([1, 2], use_local_synchronization=True))
    del kept


def test_wrapper_does_not_change_user_group_names() -> None:
    run_ranks(4, local_groups_beside_wrappers)


def miss_once(world: World) -> str:
    group = dist.group.WORLD
    assert group is not None
    message = ""
    if world.rank == 0:
        with pytest.raises(CommunicationError) as caught:
            open_own_group(group, "gloo", timedelta(seconds=0.5))
        message = str(caught.value)
    dist.barrier()
    reopened = open_own_group(group, "gloo", timedelta(seconds=20))
    total = torch.ones(1)
    reopened.allreduce([total]).wait()
    assert total.item() == world.size
    return message


def test_rendezvous_works_after_a_timed_out_attempt(pools: Pools) -> None:
    assert "rank 1 did not arrive" in pools.run(2, miss_once)[0]


def uses(model: DistributedDataParallel) -> dict[str, Callable[[], Any]]:
    batch = torch.ones(2, 3, dtype=torch.float64)
    return {"forward": lambda: model(batch), "sync_gradients": model.sync_gradients}


def outlive_group(world: World) -> None:
    group = dist.new_group([0, 1])
    for given in (group, None):
        model = step(given)
        loss: Tensor = model(torch.ones(2, 3, dtype=torch.float64)).sum()
        dist.destroy_process_group(given)
        for use in (*uses(model).values(), loss.backward):
            with pytest.raises(CommunicationError, match=r"process group .* was destroyed; wrap the model again"):
                use()


def test_wrapper_that_outlives_its_group_raises_a_clear_error() -> None:
    for backend in ("paceline", "gloo"):
        run_ranks(2, outlive_group, backend=backend)


def reinitialize_repeatedly(world: World, backend: str, by_torch: bool) -> None:
    step(None)  # otherwise rank 0 could leave the first world while Gloo still connects rank 1 to it
    for turn in range(10):
        dist.destroy_process_group()
        if by_torch:
            dist.init_process_group(backend)
        else:
            paceline.init(backend)
        step(None)
        if turn % 3 == world.rank:
            gc.collect()


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "by_torch"), [("gloo", False), ("paceline", True)])
def test_world_can_be_destroyed_and_initialized_ten_times(backend: str, by_torch: bool) -> None:
    # The launcher's store kept the addresses of the first world, and ranks occasionally connected to one of them.
    run_ranks(2, reinitialize_repeatedly, backend, by_torch, backend=backend)
