"""Wrappers over subgroups, and the channels that wrappers open.

Only members take part, resources are released, and a destroyed group ends its wrapper.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import paceline
from insides import SPLIT, TEST_HOST_CHANNEL, open_channel, open_host_group, open_own_group
from models import chain
from paceline import World
from paceline.ddp import DistributedDataParallel
from paceline.errors import CommunicationError
from ranks import Pools, run_ranks
from twins import same_gradients


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
    same_gradients(model.module, twin)
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


# -- channels ----------------------------------------------------------------------------------------------------------


LENGTH = 24  # a multiple of every number of ranks used here


@contextmanager
def environment(**variables: str) -> Iterator[None]:
    """Set environment variables temporarily, because other tests reuse the rank."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        yield


def values(rank: int) -> torch.Tensor:
    return torch.arange(LENGTH, dtype=torch.float32) * (rank + 1) + 10 * rank


def run_host_channel(world: World, hosts: int) -> tuple[str, list[list[int]], list[list[float]], list[str]]:
    """Return the kind of host channel, gathered rows, concurrent sums and warnings."""
    with warnings.catch_warnings(record=True) as caught, environment(**{TEST_HOST_CHANNEL: "1", SPLIT: str(hosts)}):
        warnings.simplefilter("always")
        channel = open_channel(dist.group.WORLD, torch.device("cpu"))
    table, launched = channel.gather_rows(torch.tensor([world.rank, 2**53 + world.rank]))
    channel.wait(launched, "gathering of rows")
    sums = [values(world.rank).double() * turn for turn in range(5)]
    for work in [channel.host.all_reduce(vector) for vector in sums]:
        channel.wait(work, "sum")
    assert channel.all_gather_object("x" * world.rank) == ["x" * rank for rank in range(world.size)]
    kind = type(channel.host).__name__
    channel.close()
    return kind, table.tolist(), [vector.tolist() for vector in sums], [str(warning.message) for warning in caught]


@pytest.mark.parametrize(
    ("backend", "ranks", "hosts", "kind"),
    [("pools", 2, 1, "HostChannel"), ("pools", 4, 2, "Channel"), ("gloo", 3, 2, "Channel")],
)
def test_host_data_of_device_models_uses_a_separate_channel(
    request: pytest.FixtureRequest, backend: str, ranks: int, hosts: int, kind: str
) -> None:
    """Shared memory on one host, shared memory and Gloo on several hosts, and Gloo alone for uneven hosts."""
    total = sum((values(rank).double() for rank in range(ranks)), torch.zeros(LENGTH, dtype=torch.float64))
    for channel_kind, rows, sums, warned in request.getfixturevalue(backend).run(ranks, run_host_channel, hosts):
        assert channel_kind == kind
        assert rows == [[other, 2**53 + other] for other in range(ranks)]
        assert sums == [(total * turn).tolist() for turn in range(5)]
        assert not [text for text in warned if "uses Gloo" in text and backend == "gloo"]  # already known


def launch_many_collectives(world: World) -> None:
    with warnings.catch_warnings(), environment(**{SPLIT: "2"}):
        warnings.simplefilter("ignore")
        group = dist.new_group(backend="paceline")
    for _ in range(400):
        dist.all_reduce(torch.ones(1), group=group, async_op=True)
    last = torch.ones(1)
    dist.all_reduce(last, group=group)
    assert last == 2


def test_gloo_threads_release_tensors_while_collectives_are_launched(pools: Pools) -> None:
    """They need the GIL, which a collective launched through ``super()`` held: both deadlocked."""
    pools.run(2, launch_many_collectives)


def run_gpu_channel(world: World) -> tuple[str, list[float], list[float], int]:
    """Run the collectives of a GPU model's channel on CPU tensors."""
    channel = open_channel(dist.group.WORLD, torch.device("cuda"))
    vector = channel.allocate(LENGTH, torch.float32)
    vector.copy_(values(world.rank))
    channel.wait(channel.all_reduce(vector), "sum of CPU tensors")
    buffers = [values(world.rank), torch.tensor([world.rank])]
    channel.broadcast(buffers, 1)
    channel.free(vector)
    channel.progress()
    kind = type(channel).__name__
    channel.close()
    return kind, vector.tolist(), buffers[0].tolist(), int(buffers[1])


def test_cpu_tensors_of_a_gpu_model_use_the_host_channel(pools: Pools, gloo: Pools) -> None:
    total = (values(0) + values(1)).tolist()
    for ranks in (pools, gloo):
        assert ranks.run(2, run_gpu_channel) == [("DeviceChannel", total, values(1).tolist(), 1)] * 2


def open_unreachable_group(world: World) -> str:
    group = dist.group.WORLD
    variables = {TEST_HOST_CHANNEL: "1", "GLOO_SOCKET_IFNAME": "nowhere0", SPLIT: "2"}
    with environment(**variables), pytest.raises(CommunicationError) as caught:
        open_host_group(group, timedelta(seconds=5))
    return str(caught.value)


def test_unreachable_hosts_beside_nccl_are_reported_immediately(pools: Pools) -> None:
    """A world initialized with only NCCL has no connections between CPUs; the wrapper opens the first one."""
    for message in pools.run(2, open_unreachable_group):
        assert "ranks exchange control blocks between their CPUs" in message
        assert "initialized with NCCL alone" in message
        assert "GLOO_SOCKET_IFNAME" in message
