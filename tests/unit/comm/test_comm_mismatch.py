"""Ranks that call different operations all get the same error, no rank hangs, and the group still works."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from paceline.comm.shm_collectives import STAGE_BYTES
from paceline.core.world import World
from paceline.errors import CommunicationError, DesyncError, UsageError
from ranks import Ranks
from twins import Pools

CHUNK = STAGE_BYTES // 4  # float32
DIFFERENT: list[tuple[Callable[[], Any], Callable[[], Any], str]] = [
    (
        lambda: dist.all_reduce(torch.ones(8)),
        lambda: dist.broadcast(torch.ones(8), 0),
        r"all_reduce of 8 × float32 by SUM.*broadcast of 8 × float32 from rank 0",
    ),
    (
        lambda: dist.all_reduce(torch.ones(8)),
        lambda: dist.all_reduce(torch.ones(8, dtype=torch.int32)),
        "8 × float32.*8 × int32",
    ),
    (
        lambda: dist.all_reduce(torch.ones(8)),
        lambda: dist.all_reduce(torch.ones(8), dist.ReduceOp.MAX),
        "by SUM.*by MAX",
    ),
    (lambda: dist.broadcast(torch.ones(8), 0), lambda: dist.broadcast(torch.ones(8), 1), "from rank 0.*from rank 1"),
    (
        lambda: dist.all_reduce(torch.ones(100)),
        lambda: dist.all_reduce(torch.ones(5 * CHUNK)),
        f"{100} × float32.*{5 * CHUNK} × float32",
    ),
    (dist.barrier, lambda: dist.broadcast(torch.ones(3 * CHUNK), 0), "barrier; rank .*broadcast of"),
    (
        lambda: dist.all_gather([torch.ones(3 * CHUNK)] * dist.get_world_size(), torch.ones(3 * CHUNK)),
        lambda: dist.reduce_scatter(torch.ones(CHUNK), [torch.ones(CHUNK)] * dist.get_world_size()),
        "all_gather of.*reduce_scatter of",
    ),
    (
        lambda: dist.all_reduce(torch.ones(3 * CHUNK), async_op=True).wait(),
        lambda: dist.all_reduce(torch.ones(2), async_op=True).wait(),
        f"{3 * CHUNK} × float32.* 2 × float32",
    ),
]


def works(world: World) -> None:
    """Check that the group still works, with small and large messages in both directions."""
    for count in (1, 3 * CHUNK + 5):
        tensor = torch.full((count,), float(world.rank + 1))
        dist.all_reduce(tensor)
        assert tensor.eq(sum(range(1, world.size + 1))).all()
    dist.barrier()


def differ(world: World) -> list[str]:
    told = []
    for one, other, _ in DIFFERENT:
        with pytest.raises(DesyncError) as caught:
            (other if world.rank == 2 else one)()
        told.append(str(caught.value))
        works(world)
    return told


def test_a_mismatch_is_named_on_every_rank_and_the_group_still_works(pools: Pools) -> None:
    for rank, told in enumerate(pools.run(3, differ)):
        for message, (*_, named) in zip(told, DIFFERENT, strict=True):
            assert message.startswith(f"rank {rank}: ranks are out of step in operation "), message
            assert re.search(named, message), message
            assert "rank 2: " in message.replace(f"rank {rank}: ranks", "")


def differ_in_a_subgroup(world: World) -> str:
    group = dist.new_group([1, 2])
    if world.rank == 0:
        return ""
    with pytest.raises(DesyncError) as caught:
        dist.all_reduce(torch.ones(world.rank), group=group)
    return str(caught.value)


def test_errors_in_a_subgroup_use_global_ranks(pools: Pools) -> None:
    for rank, message in enumerate(pools.run(3, differ_in_a_subgroup)):
        if rank:
            assert message.startswith(f"rank {rank}: ")
            assert "(rank 1: all_reduce of 1 × float32 by SUM; rank 2: all_reduce of 2" in message


def launch_differently(world: World) -> list[str]:
    group: Any = dist.group.WORLD
    tensors = [group.allocate(8 + (world.rank == 1 and i == 1), torch.float32) for i in range(4)]
    message = []
    for operation in [group.launch_all_reduce(tensor) for tensor in tensors]:
        try:
            operation.wait()
            message.append("")
        except DesyncError as error:
            message.append(str(error))
    for tensor in tensors:
        group.free(tensor)
    works(world)
    return message


def test_one_mismatched_launch_is_named_and_the_others_succeed(pools: Pools) -> None:
    for message in pools.run(3, launch_differently):
        assert [bool(one) for one in message] == [False, True, False, False]
        assert "rank 0, 2: shared all_reduce of 8 × float32 by SUM; rank 1: shared all_reduce of 9" in message[1]


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


def test_a_skipped_collective_is_named_at_timeout_with_rank_and_operation() -> None:
    with Ranks(2, backend="paceline") as ranks:
        (message, took), _ = ranks.run(skip)
    assert re.match(
        r"rank 0: rank 1 \(pid \d+, which has begun \d+ operations of this group\) did not take part within 0\.5 s in "
        r"all_reduce of 3 × float32 by SUM, operation \d+ of this group; see the error",
        message,
    ), message
    assert took > 0.4


# -- wrong arguments ---------------------------------------------------------------------------------------------------


def wrong(world: World) -> tuple[str, str]:
    n = world.size
    group: Any = dist.group.WORLD
    ones = torch.ones(4)
    of_torch: list[Callable[[], Any]] = [
        lambda: dist.broadcast(ones, 9),
        lambda: dist.reduce(ones, -3),
        lambda: dist.gather(ones, [ones] * n if world.rank == 0 else None, n),
        lambda: dist.all_reduce(torch.ones(4, device="meta")),
        lambda: dist.broadcast(torch.ones(4, device="meta"), 0),
        lambda: dist.all_reduce(ones, dist.ReduceOp.BAND),
        lambda: dist.all_reduce(torch.ones(4, dtype=torch.int64), dist.ReduceOp.AVG),
        lambda: dist.all_reduce(torch.ones(4, dtype=torch.uint16)),
        lambda: dist.all_to_all_single(torch.ones(5 * n + 1), torch.ones(5 * n + 1)),
        lambda: dist.all_to_all_single(ones, ones, [9] * n, [1] * n),
        lambda: dist.all_gather([ones] * (n + 1), ones),
        lambda: dist.reduce_scatter(ones, [torch.ones(4, dtype=torch.int64)] * n),
    ]
    ours: list[Callable[[], Any]] = [
        lambda: group.allocate(10**15, torch.float32),
        lambda: group.allocate(-1, torch.float32),
        lambda: group.free(ones),
        lambda: group.launch_all_reduce(ones),
    ]
    message = []
    for call in of_torch + ours:
        with pytest.raises(UsageError if call in ours else (ValueError, TypeError, RuntimeError, UsageError)) as caught:
            call()
        assert not isinstance(caught.value, CommunicationError)
        message.append(str(caught.value))
        dist.barrier()
    works(world)
    return message[0], message[12]


def test_wrong_arguments_raise_clear_errors_and_the_group_still_works(pools: Pools) -> None:
    for root, memory in pools.run(3, wrong):
        assert "from rank 9 of a group of 3" in root
        assert "4,000,000,000,000,000 bytes of shared memory were requested, but the host has" in memory
