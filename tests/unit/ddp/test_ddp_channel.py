"""The channel's collectives, compared with the sums and rows computed in one process."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from paceline.comm.topology import SPLIT
from paceline.core.world import World
from paceline.ddp.channel import TEST_HOST_CHANNEL, open_channel, open_host_group
from paceline.errors import CommunicationError
from ranks import Pools

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


def run_all(world: World) -> tuple[list[float], list[float], list[list[int]], str]:
    channel = open_channel(dist.group.WORLD, torch.device("cpu"))
    flat = channel.allocate(LENGTH, torch.float32)
    flat.copy_(values(world.rank))
    channel.wait(channel.all_reduce(flat), "all-reduce")
    shard = channel.shard(flat).tolist()
    length = LENGTH // world.size
    flat[: world.rank * length] = flat[(world.rank + 1) * length :] = 0
    channel.wait(channel.all_gather(flat), "all-gather")
    table, launched = channel.gather_rows(torch.tensor([world.rank, 2**53 + world.rank]))
    channel.wait(launched, "gathering of rows")
    with pytest.raises(ValueError, match="5 elements cannot be cut into"):
        channel.all_gather(torch.zeros(5))
    return shard, flat.tolist(), table.tolist(), str(channel.all_gather_object("x" * world.rank))


@pytest.mark.parametrize(("ranks", "backend"), [(4, "pools"), (2, "gloo")])
def test_shards_and_rows_equal_one_process(request: pytest.FixtureRequest, ranks: int, backend: str) -> None:
    total = sum((values(rank) for rank in range(ranks)), torch.zeros(LENGTH)).tolist()
    length = LENGTH // ranks
    for rank, (shard, gathered, rows, objects) in enumerate(request.getfixturevalue(backend).run(ranks, run_all)):
        assert shard == total[rank * length : (rank + 1) * length]
        assert gathered == total
        assert rows == [[other, 2**53 + other] for other in range(ranks)]
        assert objects == str(["x" * other for other in range(ranks)])


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


def read_alone(world: World) -> None:
    with environment(**{TEST_HOST_CHANNEL: "1"}):
        channel = open_channel(dist.group.WORLD, torch.device("cpu"))
    vector = values(world.rank).double()
    launched = channel.host.all_reduce(vector)
    if world.rank == 0:
        channel.wait(launched, "sum")
        dist.send(torch.ones(1), 1)
    else:
        dist.recv(torch.ones(1), 0)  # arrives only after rank 0 has read
        channel.wait(launched, "sum")
    assert vector.tolist() == (values(0).double() + values(1).double()).tolist()


def test_control_block_can_be_read_before_other_ranks_read_theirs(pools: Pools) -> None:
    """Between backward and the optimizer step a rank may wait in a user's collective without making progress."""
    pools.run(2, read_alone)


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
