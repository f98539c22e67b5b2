"""Ranks that call different things get the same named error, none hangs, and the group works afterwards."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from paceline.comm.shm.stage import STAGE_BYTES
from paceline.core.processes.world import World
from paceline.errors import CommunicationError, DesyncError, UsageError
from ranks import Ranks
from twins import Pools

CHUNK = STAGE_BYTES // 4  # float32
DIFFERENT: dict[str, tuple[Callable[[int], Any], Callable[[int], Any], str]] = {
    "operation": (
        lambda n: dist.all_reduce(torch.ones(8)),
        lambda n: dist.broadcast(torch.ones(8), 0),
        r"all_reduce of 8 × float32 by SUM.*broadcast of 8 × float32 from rank 0",
    ),
    "dtype of equal bytes": (
        lambda n: dist.all_reduce(torch.ones(8)),
        lambda n: dist.all_reduce(torch.ones(8, dtype=torch.int32)),
        "8 × float32.*8 × int32",
    ),
    "reduction": (
        lambda n: dist.all_reduce(torch.ones(8)),
        lambda n: dist.all_reduce(torch.ones(8), dist.ReduceOp.MAX),
        "by SUM.*by MAX",
    ),
    "root": (
        lambda n: dist.broadcast(torch.ones(8), 0),
        lambda n: dist.broadcast(torch.ones(8), 1),
        "from rank 0.*from rank 1",
    ),
    "1 chunk and 5": (
        lambda n: dist.all_reduce(torch.ones(100)),
        lambda n: dist.all_reduce(torch.ones(5 * CHUNK)),
        f"{100} × float32.*{5 * CHUNK} × float32",
    ),
    "barrier and 3 chunks": (
        lambda n: dist.barrier(),
        lambda n: dist.broadcast(torch.ones(3 * CHUNK), 0),
        "barrier; rank .*broadcast of",
    ),
    "chunks of different collectives": (
        lambda n: dist.all_gather([torch.ones(3 * CHUNK) for _ in range(n)], torch.ones(3 * CHUNK)),
        lambda n: dist.reduce_scatter(torch.ones(CHUNK), [torch.ones(CHUNK) for _ in range(n)]),
        "all_gather of.*reduce_scatter of",
    ),
    "asynchronous": (
        lambda n: dist.all_reduce(torch.ones(3 * CHUNK), async_op=True).wait(),
        lambda n: dist.all_reduce(torch.ones(2), async_op=True).wait(),
        f"{3 * CHUNK} × float32.* 2 × float32",
    ),
}


@pytest.fixture(scope="module")
def pools() -> Iterator[Pools]:
    with Pools("paceline") as pools:
        yield pools


def works(world: World) -> None:
    """The group is usable: small and large, in both directions."""
    for count in (1, 3 * CHUNK + 5):
        tensor = torch.full((count,), float(world.rank + 1))
        dist.all_reduce(tensor)
        assert tensor.eq(sum(range(1, world.size + 1))).all()
    dist.barrier()


def differ(world: World, case: str, odd: int) -> str:
    one, other, _ = DIFFERENT[case]
    said = ""
    try:
        (other if world.rank == odd else one)(world.size)
    except DesyncError as error:
        said = str(error)
    works(world)
    return said


@pytest.mark.parametrize("case", list(DIFFERENT))
def test_a_difference_is_named_on_every_rank_and_the_group_works_afterwards(pools: Pools, case: str) -> None:
    for size, odd in ((2, 1), (3, 2)):
        for rank, said in enumerate(pools.run(size, differ, case, odd)):
            assert said.startswith(f"rank {rank}: ranks are out of step in operation "), said
            assert re.search(DIFFERENT[case][2], said), said
            assert f"rank {odd}: " in said.replace(f"rank {rank}: ranks", "")


def differ_in_a_subgroup(world: World) -> str:
    group = dist.new_group([1, 2])
    if world.rank == 0:
        return ""
    with pytest.raises(DesyncError) as caught:
        dist.all_reduce(torch.ones(world.rank), group=group)
    return str(caught.value)


def test_in_a_subgroup_ranks_have_their_names_of_the_world(pools: Pools) -> None:
    for rank, said in enumerate(pools.run(3, differ_in_a_subgroup)):
        if rank:
            assert said.startswith(f"rank {rank}: ")
            assert "(rank 1: all_reduce of 1 × float32 by SUM; rank 2: all_reduce of 2" in said


def launch_differently(world: World) -> list[str]:
    group: Any = dist.group.WORLD
    tensors = [group.allocate(8 + world.rank * (i == 1), torch.float32) for i in range(4)]
    said = []
    for operation in [group.launch_all_reduce(tensor) for tensor in tensors]:
        try:
            operation.wait()
            said.append("")
        except DesyncError as error:
            said.append(str(error))
    for tensor in tensors:
        group.free(tensor)
    works(world)
    return said


def test_one_wrong_launch_of_several_is_named_and_the_others_are_right(pools: Pools) -> None:
    for said in pools.run(2, launch_differently):
        assert [bool(one) for one in said] == [False, True, False, False]
        assert "rank 0: shared all_reduce of 8 × float32 by SUM; rank 1: shared all_reduce of 9" in said[1]


def skip(world: World) -> tuple[str, float]:
    works(world)
    group: Any = dist.group.WORLD
    group.set_timeout(timedelta(seconds=0.5))
    start = time.monotonic()
    if world.rank == 1:
        return "", 0.0
    try:
        dist.all_reduce(torch.ones(3))
    except CommunicationError as error:
        first, took = str(error), time.monotonic() - start
    with pytest.raises(CommunicationError, match="cannot be used any longer, because rank 1"):
        dist.barrier()
    with pytest.raises(CommunicationError, match="cannot be used any longer, because rank 1"):
        dist.barrier(async_op=True).wait()
    return first, took


def test_a_skipped_collective_is_named_after_the_timeout_with_rank_operation_and_number() -> None:
    with Ranks(2, backend="paceline") as ranks:
        (said, took), _ = ranks.run(skip)
    assert re.match(
        r"rank 0: rank 1 \(pid \d+, which has begun \d+ operations of this group\) did not take part within 0\.5 s in "
        r"all_reduce of 3 × float32 by SUM, operation \d+ of this group; see the error",
        said,
    ), said
    assert took > 0.4


# -- arguments that cannot be right ------------------------------------------------------------------------------------


def wrong(world: World) -> list[str]:
    n = world.size
    group: Any = dist.group.WORLD
    ones = torch.ones(4)
    calls: list[tuple[Any, Any]] = [
        (lambda: dist.broadcast(ones, 9), (ValueError, UsageError)),
        (lambda: dist.reduce(ones, -3), (ValueError, RuntimeError)),
        (lambda: dist.gather(ones, [ones] * n if world.rank == 0 else None, n), (ValueError, TypeError, RuntimeError)),
        (lambda: dist.all_reduce(torch.ones(4, device="meta")), (RuntimeError, UsageError)),
        (lambda: dist.broadcast(torch.ones(4, device="meta"), 0), (RuntimeError, UsageError)),
        (lambda: dist.all_reduce(ones, dist.ReduceOp.BAND), RuntimeError),
        (lambda: dist.all_reduce(torch.ones(4, dtype=torch.int64), dist.ReduceOp.AVG), RuntimeError),
        (lambda: dist.all_reduce(torch.ones(4, dtype=torch.uint16)), RuntimeError),
        (lambda: dist.all_to_all_single(torch.ones(5 * n + 1), torch.ones(5 * n + 1)), (RuntimeError, UsageError)),
        (lambda: dist.all_to_all_single(ones, ones, [9] * n, [1] * n), (RuntimeError, UsageError)),
        (lambda: dist.all_gather([ones] * (n + 1), ones), (ValueError, RuntimeError)),
        (lambda: dist.reduce_scatter(ones, [torch.ones(4, dtype=torch.int64)] * n), (ValueError, RuntimeError)),
        (lambda: group.allocate(10**15, torch.float32), UsageError),
        (lambda: group.allocate(-1, torch.float32), UsageError),
        (lambda: group.free(ones), UsageError),
        (lambda: group.launch_all_reduce(ones), UsageError),
    ]
    said = []
    for at, (call, kinds) in enumerate(calls):
        try:
            call()
            said.append(f"call {at}: no error")
        except kinds as error:
            said.append(f"{type(error).__name__}: {error}")
        works(world)
    return said


@pytest.mark.ranks(2, backend="paceline")
def test_wrong_arguments_are_clear_errors_and_the_group_works_afterwards(world: World) -> None:
    said = wrong(world)
    assert not [one for one in said if "no error" in one or "CommunicationError" in one], said
    assert "from rank 9 of a group of 2" in said[0]
    assert "4,000,000,000,000,000 bytes of shared memory were requested, but the host has" in said[12]
