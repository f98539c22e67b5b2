"""Small all-reduces: every rank computes the sum itself once all ranks have published their input."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from insides import SMALL_BYTES, Handle
from paceline import World
from paceline.errors import CommunicationError
from processes import alive, until
from ranks import Pools, Ranks

LARGEST = SMALL_BYTES // 4
SUMS = {2: 3.0, 3: 6.0, 4: 10.0}


def mine(world: World, count: int = 5) -> Tensor:
    return torch.full((count,), world.rank + 1.0)


def scatter(part: Tensor) -> None:
    dist.scatter(part, [torch.ones_like(part)] * 2 if dist.get_rank() == 0 else None)


def start_in_a_callback(world: World) -> None:
    """An operation started in a callback precedes those of the main thread, whichever thread is faster on a rank."""

    def start_another(future: torch.futures.Future[Any]) -> Tensor:
        time.sleep(0.1 * (1 - world.rank))
        another, part = mine(world, 3), torch.zeros(2)
        dist.all_reduce(another)
        scatter(part)
        assert part.eq(1).all()
        return another

    following: list[Callable[[Tensor], Any]] = [
        dist.all_reduce,
        lambda tensor: dist.all_reduce(tensor, async_op=True).wait(),
        lambda tensor: dist.broadcast(tensor.expand(LARGEST + 1).contiguous(), 0),
        scatter,  # delegated to Gloo
    ]
    for follow in following * 2:
        first = dist.all_reduce(mine(world, LARGEST + 1), async_op=True)
        second = first.get_future().then(start_another)
        first.wait()
        time.sleep(0.1 * world.rank)
        follow(torch.ones(1))
        assert second.wait().eq(SUMS[world.size]).all()


def test_an_operation_started_in_a_callback_has_the_same_order_on_every_rank(pools: Pools) -> None:
    pools.run(2, start_in_a_callback)


def test_a_failing_value_fails_the_future_and_not_the_thread() -> None:
    handle = Handle([torch.ones(1)])

    def value() -> Tensor:
        raise RuntimeError("no memory for the value")

    handle.value = value
    future = handle.get_future()
    handle.run(lambda: None)  # as the thread does; an error here would end it
    assert handle.is_over()
    assert handle.wait()
    with pytest.raises(RuntimeError, match="no memory for the value"):
        future.wait()


def turns(world: World) -> None:
    """Small all-reduces follow launched and large ones that have not started, at a different pace on every rank."""
    group: Any = dist.group.WORLD
    shared = group.allocate(50_000, torch.float32)
    for turn in range(20):
        shared.fill_(world.rank + 1)
        launched = group.launch_all_reduce(shared)
        tensors = [mine(world, count) for count in (5, 300_000, LARGEST, LARGEST + 1, 1, 70_000, 2)]
        works: list[Any] = []
        for number, tensor in enumerate(tensors):
            if (turn + number + world.rank) % 4 == 0:
                time.sleep(0.001)  # lets the thread catch up on one rank only
            works.append(dist.all_reduce(tensor, async_op=True))
            group.progress()
        for work in [*works, launched] if turn % 2 else [launched, *reversed(works)]:
            work.wait()
        for tensor in [*tensors, shared]:
            assert tensor.eq(SUMS[world.size]).all(), (turn, tensor.numel())
    group.free(shared)


def test_small_all_reduces_keep_their_order_among_launched_and_large_ones(pools: Pools) -> None:
    pools.run(2, turns)


def exit_after_publishing(world: World) -> str:
    """Rank 0 publishes its input and exits, which is all that the others need."""
    peer = torch.tensor([os.getpid()])
    dist.broadcast(peer, 0)
    dist.barrier()
    tensor = mine(world)
    if world.rank == 0:
        dist.all_reduce(tensor, async_op=True)
        os._exit(0)
    if world.rank == 2:
        until(lambda: not alive(int(peer)))
        time.sleep(1.2)  # longer than a single sleep of rank 1
    dist.all_reduce(tensor)
    assert tensor.eq(SUMS[world.size]).all()
    with pytest.raises(CommunicationError, match=r"rank 0 \(pid \d+\) has ended in barrier"):
        dist.barrier()
    return "seen"


def test_a_rank_may_exit_once_it_has_published_its_input() -> None:
    with Ranks(3, 100, "paceline") as ranks:
        ranks.start(exit_after_publishing)
        assert [ranks.answer(rank, 90) for rank in (1, 2)] == ["seen", "seen"]


def run_ahead(world: World) -> None:
    """Rank 1 has posted all operations when rank 0 starts, and stays out of the group until rank 0 is done."""
    tensors = [mine(world) for _ in range(4)]
    dist.barrier()
    if world.rank == 1:
        works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
        dist.send(torch.ones(1), 0)
        dist.recv(torch.ones(1), 0)
        assert all(work.wait() for work in works)
    else:
        dist.recv(torch.ones(1), 1)
        for number, tensor in enumerate(tensors):
            work = dist.all_reduce(tensor, async_op=True)
            # One ring announced all of them, so waiting for another ring would block.
            assert number == 0 or work.is_completed()
            work.wait()
        dist.send(torch.ones(1), 1)
    assert all(tensor.eq(SUMS[world.size]).all() for tensor in tensors)


def test_a_sum_with_all_inputs_published_needs_no_further_ring(pools: Pools) -> None:
    pools.run(2, run_ahead)


def start_many_first(world: World) -> None:
    """Rank 1 starts only after rank 0 has started more operations than may be pending."""
    tensors = [mine(world) for _ in range(400)]
    if world.rank == 1:
        dist.recv(torch.ones(1), 0)
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    if world.rank == 0:
        dist.send(torch.ones(1), 1)
    for work in works:
        work.wait()
    assert all(tensor.eq(SUMS[world.size]).all() for tensor in tensors)


def test_starting_an_operation_does_not_wait_for_other_ranks(pools: Pools) -> None:
    pools.run(2, start_many_first)


def start_during_a_wait(world: World) -> None:
    """Rank 1 starts only after rank 0 has started a second operation while another thread waits for the first."""
    first, second = mine(world), mine(world)
    if world.rank == 0:
        work = dist.all_reduce(first, async_op=True)
        waiting = threading.Thread(target=work.wait)
        waiting.start()
        time.sleep(0.1)  # until it waits; if it takes longer, the test passes without testing
        later = dist.all_reduce(second, async_op=True)
        dist.send(torch.ones(1), 1)
        waiting.join()
        later.wait()
    else:
        dist.recv(torch.ones(1), 0)
        dist.all_reduce(first)
        dist.all_reduce(second)
    assert first.eq(SUMS[world.size]).all()
    assert second.eq(SUMS[world.size]).all()


def test_one_thread_may_start_an_operation_while_another_waits(pools: Pools) -> None:
    pools.run(2, start_during_a_wait)


def poll_for_a_dead_rank(world: World) -> str:
    dist.barrier()
    if world.rank == 1:
        os._exit(0)
    work = dist.all_reduce(mine(world), async_op=True)
    until(work.is_completed)
    assert not work.is_success()
    return str(work.exception())


def test_polling_is_completed_notices_a_dead_rank() -> None:
    with Ranks(2, 100, "paceline") as ranks:
        ranks.start(poll_for_a_dead_rank)
        assert "has ended in all_reduce of 5 × float32" in ranks.answer(0, 90)
