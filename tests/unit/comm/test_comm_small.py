"""Small all-reduces, which every rank computes for itself as soon as all have shown their part."""

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

from paceline.comm.shm_collectives import SMALL_BYTES
from paceline.comm.work import Handle
from paceline.core.world import World
from paceline.errors import CommunicationError
from processes import alive, until
from ranks import Pools, Ranks

LARGEST = SMALL_BYTES // 4
SUMS = {2: 3.0, 3: 6.0, 4: 10.0}


def mine(world: World, count: int = 5) -> Tensor:
    return torch.full((count,), world.rank + 1.0)


def polled(world: World) -> None:
    """No thread works on it, so the question has to."""
    tensor = mine(world)
    work = dist.all_reduce(tensor, async_op=True)
    until(work.is_completed)
    assert tensor.eq(SUMS[world.size]).all()
    assert work.is_success()
    assert work.wait()


def test_to_ask_whether_it_is_completed_is_enough(pools: Pools) -> None:
    pools.run(2, polled)


def scatter(part: Tensor) -> None:
    dist.scatter(part, [torch.ones_like(part)] * 2 if dist.get_rank() == 0 else None)


def begun_in_a_callback(world: World) -> None:
    """An operation that a callback begins comes before those of the main thread, on whichever rank that is quicker."""

    def begin_another(future: torch.futures.Future[Any]) -> Tensor:
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
        scatter,  # Gloo's
    ]
    for follow in following * 2:
        first = dist.all_reduce(mine(world, LARGEST + 1), async_op=True)
        second = first.get_future().then(begin_another)
        first.wait()
        time.sleep(0.1 * world.rank)
        follow(torch.ones(1))
        assert second.wait().eq(SUMS[world.size]).all()


def test_an_operation_begun_in_a_callback_has_its_place_on_every_rank(pools: Pools) -> None:
    pools.run(2, begun_in_a_callback)


def test_a_value_that_cannot_be_made_fails_the_future_and_not_the_thread() -> None:
    handle = Handle([torch.ones(1)])

    def value() -> Tensor:
        raise RuntimeError("no memory for the value")

    handle.value = value
    future = handle.get_future()
    handle.run(lambda: None)  # as the thread does, which would end by an error
    assert handle.is_over()
    assert handle.wait()
    with pytest.raises(RuntimeError, match="no memory for the value"):
        future.wait()


def turns(world: World) -> None:
    """Small ones follow launched and large ones that nobody has begun yet, on every rank at its own pace."""
    group: Any = dist.group.WORLD
    shared = group.allocate(50_000, torch.float32)
    for turn in range(20):
        shared.fill_(world.rank + 1)
        launched = group.launch_all_reduce(shared)
        tensors = [mine(world, count) for count in (5, 300_000, LARGEST, LARGEST + 1, 1, 70_000, 2)]
        works: list[Any] = []
        for number, tensor in enumerate(tensors):
            if (turn + number + world.rank) % 4 == 0:
                time.sleep(0.001)  # so that the thread has caught up on one rank alone
            works.append(dist.all_reduce(tensor, async_op=True))
            group.progress()
        for work in [*works, launched] if turn % 2 else [launched, *reversed(works)]:
            work.wait()
        for tensor in [*tensors, shared]:
            assert tensor.eq(SUMS[world.size]).all(), (turn, tensor.numel())
    group.free(shared)


def test_small_ones_keep_their_turn_among_launched_and_large_ones(pools: Pools) -> None:
    pools.run(2, turns)


def ends_after_its_part(world: World) -> str:
    """Rank 0 shows its part and ends. It has done all that the others need."""
    peer = torch.tensor([os.getpid()])
    dist.broadcast(peer, 0)
    dist.barrier()
    tensor = mine(world)
    if world.rank == 0:
        dist.all_reduce(tensor, async_op=True)
        os._exit(0)
    if world.rank == 2:
        until(lambda: not alive(int(peer)))
        time.sleep(1.2)  # longer than rank 1 sleeps in one piece
    dist.all_reduce(tensor)
    assert tensor.eq(SUMS[world.size]).all()
    with pytest.raises(CommunicationError, match=r"rank 0 \(pid \d+\) has ended in barrier"):
        dist.barrier()
    return "seen"


def test_a_rank_may_end_when_it_has_shown_its_part() -> None:
    with Ranks(3, 100, "paceline") as ranks:
        ranks.start(ends_after_its_part)
        assert [ranks.answer(rank, 90) for rank in (1, 2)] == ["seen", "seen"]


def runs_ahead(world: World) -> None:
    """Rank 1 has posted all of them when rank 0 begins, and never calls the group again before rank 0 is done."""
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
            # The ring for all of them came with the first, so a wait for another one would sleep.
            assert number == 0 or work.is_completed()
            work.wait()
        dist.send(torch.ones(1), 1)
    assert all(tensor.eq(SUMS[world.size]).all() for tensor in tensors)


def test_a_sum_that_all_peers_have_shown_needs_no_further_ring(pools: Pools) -> None:
    pools.run(2, runs_ahead)


def begins_many_first(world: World) -> None:
    """Rank 1 begins none before rank 0 has begun more than may be under way."""
    tensors = [mine(world) for _ in range(400)]
    if world.rank == 1:
        dist.recv(torch.ones(1), 0)
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    if world.rank == 0:
        dist.send(torch.ones(1), 1)
    for work in works:
        work.wait()
    assert all(tensor.eq(SUMS[world.size]).all() for tensor in tensors)


def test_to_begin_one_waits_for_no_rank(pools: Pools) -> None:
    pools.run(2, begins_many_first)


def begun_beside_a_wait(world: World) -> None:
    """Rank 1 begins none before rank 0 has begun the second one, while another thread waits for the first."""
    first, second = mine(world), mine(world)
    if world.rank == 0:
        work = dist.all_reduce(first, async_op=True)
        waiting = threading.Thread(target=work.wait)
        waiting.start()
        time.sleep(0.1)  # so that it waits; a longer start shows nothing, and does no harm
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


def test_one_thread_may_begin_while_another_waits(pools: Pools) -> None:
    pools.run(2, begun_beside_a_wait)


def polled_for_nobody(world: World) -> str:
    dist.barrier()
    if world.rank == 1:
        os._exit(0)
    work = dist.all_reduce(mine(world), async_op=True)
    until(work.is_completed)
    assert not work.is_success()
    return str(work.exception())


def test_to_ask_whether_it_is_completed_notices_that_a_rank_has_ended() -> None:
    with Ranks(2, 100, "paceline") as ranks:
        ranks.start(polled_for_nobody)
        assert "has ended in all_reduce of 5 × float32" in ranks.answer(0, 90)
