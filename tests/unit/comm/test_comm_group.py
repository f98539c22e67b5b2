"""The process group's shared memory, work handles and thread, and their complete cleanup."""

from __future__ import annotations

import gc
import os
import threading
import time
import weakref
from collections.abc import Iterator
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from drawn import TIMES
from forked import REAL_END
from insides import HEADER_BYTES, Arena, Runner
from paceline import World
from paceline.errors import CommunicationError, UsageError
from processes import paceline
from ranks import run_ranks
from twins import Pools

# -- memory ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def arena() -> Iterator[Arena]:
    arena = Arena()
    yield arena
    arena.close()


def blocks(arena: Arena) -> int:
    return os.fstat(arena.descriptor).st_blocks * 512


def test_freed_memory_returns_to_the_host_and_is_zeroed(arena: Arena) -> None:
    for _ in range(3):
        tensor = arena.allocate(1_000_000, torch.float32)
        assert not tensor.any()
        tensor.fill_(7)
        assert blocks(arena) >= 4_000_000
        arena.free(tensor)
        assert blocks(arena) == 0


def test_freed_blocks_are_merged(arena: Arena) -> None:
    for turn in range(60):
        several = [arena.allocate(1 + (turn * k) % 50_000, torch.float32) for k in range(1, 8)]
        starts = sorted((one.data_ptr(), one.data_ptr() + one.numel() * 4) for one in several)
        assert all(end <= start for (_, end), (start, _) in pairwise(starts))
        assert starts[0][0] >= arena.address + HEADER_BYTES
        for one in sorted(several, key=lambda one: (one.data_ptr() >> 12) * 7919 % (turn + 5)):
            arena.free(one)
    # The first free block is larger than all of them together.
    assert arena.allocate(1_000_000, torch.float64).data_ptr() == arena.address + HEADER_BYTES


def test_freeing_unknown_memory_and_oversized_requests_are_refused(arena: Arena) -> None:
    tensor = arena.allocate(10, torch.float32)
    arena.free(tensor)
    other = arena.allocate(5000, torch.float32)
    for wrong in (torch.zeros(4), other[2000:]):
        with pytest.raises(UsageError, match="does not come from allocate"):
            arena.free(wrong)
    arena.free(other)
    for wrong in (tensor, other):
        with pytest.raises(UsageError, match="already freed"):
            arena.free(wrong)
    with pytest.raises(UsageError, match="bytes of shared memory were requested, but the host has"):
        arena.allocate(arena.size, torch.float64)
    empty = arena.allocate(0, torch.bfloat16)
    assert empty.dtype is torch.bfloat16
    assert arena.offset_of(empty) is not None
    arena.free(empty)


def test_allocation_ignores_default_device_and_inference_mode(arena: Arena) -> None:
    with torch.inference_mode(), torch.device("meta"):
        tensor = arena.allocate(4, torch.float32)
        assert arena.allocate(0, torch.float32).device.type == "cpu"
    assert tensor.device.type == "cpu"
    tensor.add_(1)


# -- handles and the thread --------------------------------------------------------------------------------------------


@pytest.fixture
def runner() -> Iterator[Runner]:
    runner = Runner("test")
    yield runner
    runner.close()


def test_a_wait_that_times_out_does_not_cancel_the_operation(runner: Runner) -> None:
    gate = threading.Event()
    handle = runner.submit(lambda: gate.wait(10) and None, [], asynchronous=True)  # type: ignore[func-returns-value]
    with pytest.raises(CommunicationError, match=r"did not finish within 0\.05 s"):
        handle.wait(timedelta(seconds=0.05))
    gate.set()
    assert handle.wait(timedelta(seconds=5))


def test_a_finished_operation_releases_its_tensors(runner: Runner) -> None:
    for asynchronous in (True, False):
        tensor = torch.ones(10)
        alive = weakref.ref(tensor)
        handle = runner.submit(lambda kept=tensor: kept.add_(1), [tensor], asynchronous=asynchronous)  # type: ignore[misc]
        handle.wait()
        del tensor, handle
        end = time.monotonic() + 5
        while alive() is not None and time.monotonic() < end:
            time.sleep(0.005)
            gc.collect()
        assert alive() is None


# -- forks -------------------------------------------------------------------------------------------------------------


def ours() -> list[str]:
    names = []
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            names.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        except OSError:
            continue
    return [name for name in names if "eventfd" in name or "pidfd" in name]


class Spy(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        return len(ours())


def fork(world: World) -> None:
    group: Any = dist.group.WORLD
    dist.all_reduce(torch.ones(5), async_op=True).wait()
    before = len(ours())
    assert before
    for batch in DataLoader(Spy(), num_workers=2, multiprocessing_context="fork"):
        assert batch.item() < 3, "a worker holds the rank's eventfds"  # multiprocessing itself needs up to two
    if world.rank == 1:
        dist.recv(torch.ones(1), 0)  # after rank 0's child has finished its queries
    work = dist.all_reduce(torch.ones(5), async_op=True)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            second = timedelta(seconds=1)
            for ask in (lambda: dist.all_reduce(torch.ones(3)), work.wait, lambda: work.wait(second), work.get_future):
                with pytest.raises(CommunicationError, match="forked from a rank"):
                    ask()
            status = 0
            group.shutdown()
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    if world.rank == 0:
        dist.send(torch.ones(1), 1)
    work.wait()
    assert len(ours()) == before
    tensor = torch.ones(3)
    dist.all_reduce(tensor)
    assert tensor.eq(world.size).all()


def test_forked_children_close_the_ranks_descriptors_and_get_no_results(pools: Pools) -> None:
    pools.run(2, fork)


# -- leaks -------------------------------------------------------------------------------------------------------------


def footprint() -> tuple[int, int, int]:
    """Return resident anonymous and shared KiB, descriptors and threads."""
    gc.collect()
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    resident = int(status["VmRSS"].split()[0])
    return resident, len(os.listdir("/proc/self/fd")), int(status["Threads"])


def mix(world: World, rounds: int) -> None:
    """Run collectives of every kind in the same random order on every rank; other tests check the results."""
    n = world.size
    generator = torch.Generator().manual_seed(5)
    group: Any = dist.group.WORLD
    kept = group.allocate(3000, torch.float32)
    for turn in range(rounds):
        kind, count = (int(x) for x in torch.randint(0, 3000, (2,), generator=generator))
        kind, asynchronous = kind % 6, bool(turn % 2)
        ones, whole = torch.ones(count), torch.ones(n * count)
        work = None
        if kind == 0:
            group.launch_all_reduce(kept[:count]).wait()
        elif kind == 1:
            work = dist.broadcast(ones, turn % n, async_op=asynchronous)
        elif kind == 2:
            work = dist.all_gather([torch.empty(count) for _ in range(n)], ones, async_op=asynchronous)
        elif kind == 3:
            work = dist.reduce_scatter(ones, list(whole.chunk(n)), async_op=asynchronous)
        elif kind == 4:
            temporary = group.allocate(count + 1, torch.float64)
            dist.all_reduce(temporary)
            group.free(temporary)
        else:
            work = dist.all_to_all_single(torch.empty(n * count), whole, async_op=asynchronous)
        if work is not None:
            (work.get_future() if turn % 3 else work).wait()
    group.free(kept)


def thousands(world: World) -> tuple[Any, Any]:
    mix(world, 500)
    before = footprint()
    mix(world, 2500 * TIMES)
    return before, footprint()


@pytest.mark.slow
def test_thousands_of_collectives_do_not_leak_memory_descriptors_or_threads() -> None:
    for before, after in run_ranks(2, thousands, backend="paceline"):
        assert after[1:] == before[1:]
        assert after[0] - before[0] < 3000, f"{before[0]} → {after[0]} KiB"


def destroy_while_waiting(world: World) -> str:
    group: Any = dist.new_group(list(range(world.size)))
    dist.all_reduce(torch.ones(2), group=group)
    if world.rank == 1:
        dist.barrier()
        return "cannot be used any longer, because it was destroyed"
    work = dist.all_reduce(torch.ones(2), group=group, async_op=True)
    group.shutdown()
    with pytest.raises(CommunicationError) as caught:
        work.wait()
    dist.barrier()
    return str(caught.value)


def single_rank_groups(world: World) -> list[float]:
    found = []
    for turn in range(10):
        group = dist.new_group([world.rank])
        tensor = torch.tensor([float(10 * turn + world.rank)])
        dist.all_reduce(tensor, group=group)
        found.append(float(tensor))
    return found


def test_ranks_create_single_rank_groups_concurrently(pools: Pools) -> None:
    """torch asks for the same list on every rank but accepts this; our groups sometimes shared a name."""
    for rank, found in enumerate(pools.run(2, single_rank_groups)):
        assert found == [10.0 * turn + rank for turn in range(10)]


def test_waiting_in_a_destroyed_group_raises(pools: Pools) -> None:
    for message in pools.run(2, destroy_while_waiting):
        assert "cannot be used any longer, because it was destroyed" in message


# -- the end of the process --------------------------------------------------------------------------------------------

UNFINISHED = """
import torch, torch.distributed as dist, paceline
paceline.init()
tensor = torch.ones(4_000_000)
for _ in range(3000):
    dist.all_reduce(tensor, async_op=True)
"""


def test_a_process_may_exit_while_its_thread_runs_a_torch_operator(tmp_path: Path) -> None:
    """At exit, the thread was unwound through C++ code that does not allow exceptions: SIGABRT."""
    done = paceline(tmp_path, program=("-c", UNFINISHED), fork="all", **{REAL_END: "1"})
    assert (done.returncode, done.stderr) == (0, "")
