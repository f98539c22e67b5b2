from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

from paceline.comm import algorithms
from paceline.core.world import World
from paceline.errors import CommunicationError, DesyncError, PacelineError, UsageError, WorldError
from threads import ThreadRanks
from twins import Pools

ones = torch.ones
CASES: dict[str, tuple[Callable[[int, Any], Any], str]] = {
    "dtypes": (
        lambda rank, group: algorithms.linear_broadcast(
            ones(5, dtype=[torch.int32, torch.float32][rank % 2]), group=group
        ),
        "DesyncError: ranks call different collectives: linear_broadcast of 5 × int32 with src=0 on ranks 0, 2, "
        "linear_broadcast of 5 × float32 with src=0 on rank 1; call the same one on every rank",
    ),
    "roots": (
        lambda rank, group: algorithms.tree_broadcast(ones(5), src=rank // 2, group=group),
        "DesyncError: ranks call different collectives: tree_broadcast of 5 × float32 with src=0 on ranks 0, 1, "
        "tree_broadcast of 5 × float32 with src=1 on rank 2; call the same one on every rank",
    ),
    "a root outside the group": (
        lambda rank, group: algorithms.linear_reduce(ones(5), dst=3, group=group),
        "UsageError: dst=3 is not a rank of the group, which has ranks 0–2; pass one of these",
    ),
    "an average of integers": (
        lambda rank, group: algorithms.ring_all_reduce(ones(5, dtype=torch.int64), op=ReduceOp.AVG, group=group),
        "UsageError: ring_all_reduce on rank {rank}: AVG of int64 is not supported; use another op or dtype",
    ),
    "conjugate": (
        lambda rank, group: algorithms.ring_all_reduce(ones(5, dtype=torch.complex64).conj(), group=group),
        "UsageError: ring_all_reduce on rank {rank}: the tensor is a conjugate or negative view",
    ),
    "a device without a backend": (
        lambda rank, group: algorithms.ring_all_reduce(ones(5, device="meta"), group=group),
        "UsageError: ring_all_reduce on rank {rank}: the group has no backend that sends tensors on meta",
    ),
    "hosts of other ranks": (
        lambda rank, group: algorithms.hierarchical_all_reduce(ones(5), group=group, hosts="ab"),
        "UsageError: hosts names 2 hosts for 3 ranks; name the host of every rank",
    ),
}


def refusal(group: Any, call: Callable[[int, Any], Any]) -> str:
    """Return a rank's error; a following all-reduce proves that the refused call left no operation pending."""
    answer = "nothing"
    try:
        call(group.rank(), group)
    except PacelineError as error:
        answer = f"{type(error).__name__}: {error}"
    after = ones(7)
    algorithms.ring_all_reduce(after, group=group)
    assert torch.equal(after, ones(7) * group.size())
    return answer


@pytest.fixture(scope="module")
def three() -> ThreadRanks:
    return ThreadRanks(3)


@pytest.mark.parametrize("case", CASES)
def test_mismatched_calls_are_named_on_every_rank_before_sending(case: str, three: ThreadRanks) -> None:
    call, message = CASES[case]
    for rank, answer in enumerate(three.run(refusal, call)):
        assert answer.startswith(message.format(rank=rank))


def test_other_ranks_name_the_rank_that_refused_its_tensor(three: ThreadRanks) -> None:
    first, second, third = three.run(
        refusal, lambda rank, group: algorithms.ring_all_reduce([ones(3, 4), ones(4, 3).t()][rank % 2], group=group)
    )
    assert first == third == "DesyncError: rank 1 refused its tensor or argument; see the error there"
    assert second.startswith(
        "UsageError: ring_all_reduce on rank 1: the tensor of shape (3, 4) is not contiguous; pass"
    )


def test_without_a_process_group_the_error_says_what_to_call() -> None:
    with pytest.raises(WorldError, match=re.escape("no process group exists yet; call paceline.init() first")):
        algorithms.ring_all_reduce(ones(3))


def outside(world: World) -> str:
    group = dist.new_group([1, 2])
    if world.rank == 0:
        with pytest.raises(UsageError) as caught:
            algorithms.ring_all_reduce(ones(3), group=group)
        return str(caught.value)
    with pytest.raises(UsageError, match=r"src=0 is not a rank of the group, which has ranks 1, 2"):
        algorithms.tree_broadcast(ones(3), group=group)
    tensor = ones(3) * world.rank
    algorithms.tree_broadcast(tensor, src=2, group=group)  # its rank in the world
    assert torch.equal(tensor, ones(3) * 2)
    with pytest.raises(DesyncError, match=r"all_reduce of 4 × float32 by SUM on rank 1, ring_all_reduce of 5 ×"):
        algorithms.ring_all_reduce(ones(3 + world.rank), group=group)
    return ""


def test_a_rank_outside_the_group_gets_a_clear_error(pools: Pools) -> None:
    answer = pools.run(3, outside)
    assert answer[0] == "rank 0 is not in the group; call the collective only on the group's ranks"


def test_a_lost_rank_raises_a_communication_error() -> None:
    ranks = ThreadRanks(2)
    ranks.leave(1)
    with pytest.raises(CommunicationError, match=r"rank 0: the agreement with rank 1 failed"):
        ranks.run(lambda group: group and algorithms.ring_all_reduce(ones(100), group=group))
