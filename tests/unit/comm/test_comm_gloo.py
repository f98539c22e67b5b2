"""Collectives and groups that the paceline backend leaves to Gloo."""

from __future__ import annotations

import os
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import paceline
from insides import SPLIT, Engine, Refused, get_default_store, memory_identity
from paceline import World
from paceline.errors import UsageError
from ranks import Pools


def mine(rank: int, count: int = 6) -> Tensor:
    return torch.arange(float(count)) + 100 * rank


def empty(count: int) -> list[Tensor]:
    return [torch.empty(6) for _ in range(count)]


def reduce(world: World) -> Any:
    tensor = mine(world.rank)
    dist.reduce(tensor, 1)
    return tensor if world.rank == 1 else None


def all_to_all(world: World) -> Any:
    parts = [torch.empty(2) for _ in range(world.size)]
    dist.all_to_all(parts, list(mine(world.rank, 2 * world.size).chunk(world.size)))
    return parts


def ring(world: World) -> Any:
    tensor = torch.empty(6)
    after, before = (world.rank + 1) % world.size, (world.rank - 1) % world.size
    operations = [dist.P2POp(dist.isend, mine(world.rank), after), dist.P2POp(dist.irecv, tensor, before)]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    return tensor


def any_source(world: World) -> Any:
    if world.rank:
        dist.send(mine(world.rank), 0)
        return None
    tensors = empty(world.size - 1)
    return sorted((dist.recv(tensor), tensor.tolist()) for tensor in tensors)


def objects(world: World) -> Any:
    """Object collectives, which also gather and scatter tensors internally."""
    gathered: list[Any] = [None] * world.size
    dist.all_gather_object(gathered, {"rank": world.rank, "text": "x" * 1000 * world.rank})
    box: list[Any] = [f"from {world.rank}"]
    dist.broadcast_object_list(box, src=1)
    one: list[Any] = [None]
    dist.scatter_object_list(one, list(range(world.size)) if world.rank == 0 else None)
    at_root: list[Any] | None = [None] * world.size if world.rank == 0 else None
    dist.gather_object(world.rank, at_root)
    return gathered, box, one, at_root


def subgroups(world: World) -> Any:
    pair = dist.new_group([2, 0])
    tensor = mine(world.rank)
    if world.rank != 1:
        dist.all_reduce(tensor, group=pair)
    dist.barrier()
    mesh = init_device_mesh("cpu", (world.size,), mesh_dim_names=("rank",))
    also = mine(world.rank)
    dist.all_reduce(also, dist.ReduceOp.MAX, group=mesh.get_group("rank"))
    return tensor, also


def not_native(world: World) -> Any:
    """Native collectives with a dtype or layout that is left to Gloo."""
    truth = torch.tensor([world.rank == 0, True])
    dist.all_reduce(truth, dist.ReduceOp.MAX)
    sparse = torch.tensor([0.0, 1.0, float(world.rank)]).to_sparse()
    dist.all_reduce(sparse)
    return truth, sparse.to_dense()


def loosely(world: World, operation: Callable[[World], Any]) -> Any:
    warnings.simplefilter("ignore", FutureWarning)  # torch 2.13 renames collectives
    try:
        return operation(world)
    except RuntimeError as error:
        if not str(error).startswith("Backend gloo does not support"):
            raise
        return "missing"


@pytest.mark.parametrize("operation", [reduce, all_to_all, ring, any_source, objects, subgroups, not_native])
def test_delegated_collectives_give_gloos_result(pools: Pools, gloo: Pools, operation: Callable[[World], Any]) -> None:
    ours, theirs = pools.run(3, loosely, operation), gloo.run(3, loosely, operation)
    if isinstance(theirs[0], str):  # torch 2.11's Gloo has no all_to_all
        pytest.skip("Gloo of this torch does not have it")
    for our, their in zip(ours, theirs, strict=True):
        assert _plain(our) == _plain(their)


def _plain(value: Any) -> Any:
    """Convert tensors to lists for comparison."""
    if isinstance(value, Tensor):
        return value.tolist()
    return [_plain(one) for one in value] if isinstance(value, (list, tuple)) else value


def old_and_new_names(world: World) -> None:
    warnings.simplefilter("ignore", FutureWarning)
    group: Any = dist.group.WORLD
    small, large = torch.ones(4), torch.ones(4 * world.size)
    calls: dict[str, Callable[[], Any]] = {
        "all_gather_into_tensor": lambda: dist.all_gather_into_tensor(large, small),
        "all_gather_single": lambda: dist.all_gather_single(large, small),
        "reduce_scatter_tensor": lambda: dist.reduce_scatter_tensor(small, large),
        "reduce_scatter_single": lambda: dist.reduce_scatter_single(small, large),
        "functional": lambda: functional.all_gather_tensor(small, 0, group).wait(),
    }
    if not hasattr(dist, "all_gather_single"):  # before torch 2.13
        del calls["all_gather_single"], calls["reduce_scatter_single"]
    for name, call in calls.items():
        with patch.object(Engine, "post", autospec=True, side_effect=Engine.post) as post:
            call()
        assert post.call_count == 1, f"{name} is not a native operation"


def test_old_and_new_torch_names_are_both_native(pools: Pools) -> None:
    """torch 2.13 maps ``all_gather_into_tensor`` to ``all_gather_single``, which went to Gloo."""
    pools.run(3, old_and_new_names)


def overtake(world: World) -> None:
    """Launch Gloo's reduce right after a native all-reduce of the same tensor, which a late rank delays."""
    store, tensor = get_default_store(), torch.ones(200_000)
    if world.rank:
        store.get("begun")
        time.sleep(0.3)  # gives Gloo time to start too early
    work = dist.all_reduce(tensor, async_op=True)
    store.set("begun", "")
    dist.reduce(tensor, 0)
    work.wait()
    assert world.rank or tensor.eq(world.size**2).all()


def test_a_delegated_collective_waits_for_earlier_native_ones(pools: Pools) -> None:
    pools.run(3, overtake)


def send_before(world: World) -> None:
    """A receiver may receive before it joins the all-reduce, so a send that drained the queue first would deadlock."""
    tensor, letter = torch.ones(5), torch.zeros(1)
    if world.rank == 0:
        work = dist.all_reduce(tensor, async_op=True)
        dist.send(letter + 7, 1)
        work.wait()
    else:
        if world.rank == 1:
            dist.recv(letter, 0)
            assert letter == 7
        dist.all_reduce(tensor)
    assert tensor.eq(world.size).all()


def test_a_send_does_not_wait_for_native_collectives(pools: Pools) -> None:
    pools.run(3, send_before)


def refusals(world: World) -> None:
    # torch implements splitting, merging and hooks in C++; they crash without a C++ store or never call the hook.
    group: Any = dist.group.WORLD
    ours = f"^rank {world.rank}: a process group of the paceline backend cannot be "
    for call, message in {
        lambda: dist.split_group(split_ranks=[[0, 1, 2]]): f"not safe to split|{ours}split",
        lambda: group.split_group([0, 1], group_name="half"): f"{ours}split; call",
        lambda: group.merge_remote_group(dist.HashStore(), 4): f"{ours}merged",
        lambda: group.register_pre_hook(1, print): "of the paceline backend has no hooks",
    }.items():
        with pytest.raises((UsageError, ValueError, RuntimeError), match=message):
            call()
    group.monitored_barrier(timedelta(seconds=10))
    tensor = torch.ones(2)
    dist.all_reduce(tensor)
    assert tensor.tolist() == [world.size] * 2  # the group still works


def test_refusals_match_torchs_or_name_the_rank(pools: Pools) -> None:
    pools.run(3, refusals)


# -- groups without shared memory --------------------------------------------------------------------------------------


def refused(*_: Any) -> Any:
    raise PermissionError(1, "memfd_create is forbidden here")


def over_gloo(world: World, hosts: int) -> list[str]:
    """Create a group of `hosts` hosts and return its warnings. With one host, rank 1 cannot allocate shared memory."""
    with ExitStack() as stack:
        stack.enter_context(patch.dict(os.environ, {SPLIT: str(hosts)}))
        if hosts == 1 and world.rank == 1:
            stack.enter_context(patch.object(os, "memfd_create", refused))
        caught = stack.enter_context(warnings.catch_warnings(record=True))
        warnings.simplefilter("always")
        group: Any = dist.new_group(backend="paceline")
    assert (group.native, group.getBackendName()) == (False, "paceline")
    tensor = torch.ones(3)
    dist.all_reduce(tensor, group=group)
    assert tensor.tolist() == [world.size] * 3
    with pytest.raises(paceline.UsageError, match="does not use shared memory"):
        group.allocate(3, torch.float32)
    return [str(one.message) for one in caught]


@pytest.mark.parametrize(
    ("hosts", "why"),
    [
        (2, "the 2 ranks are on 2 hosts"),
        (1, "rank 1: the system refuses it: [Errno 1] memfd_create is forbidden here"),
    ],
)
def test_without_shared_memory_gloo_is_used_and_rank_0_says_why(pools: Pools, hosts: int, why: str) -> None:
    messages = pools.run(2, over_gloo, hosts)
    assert messages == [[f"the process group uses Gloo, not shared memory: {why}"], []]


def test_shared_memory_needs_linux(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(Refused, match="shared memory between ranks needs Linux, this is darwin"):
        memory_identity(0, 2)
