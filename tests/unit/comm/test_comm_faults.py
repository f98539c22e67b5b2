"""Ranks that die, stop, arrive late, call different operations or wait for each other raise errors that name them."""

from __future__ import annotations

import contextlib
import gc
import os
import random
import re
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import HashStore
from torch.utils.data import DataLoader

from insides import STAGE_BYTES, Arena, gloo, handshake, shm_engine
from paceline import DistributedDataParallel, World
from paceline.errors import CommunicationError, DesyncError, UsageError
from processes import until
from ranks import Ranks, run_ranks
from twins import Pools


def sums(world: World, count: int = 1000) -> None:
    tensor = torch.full((count,), float(world.rank + 1))
    dist.all_reduce(tensor)
    assert tensor.eq(sum(range(1, world.size + 1))).all()


def pid(world: World) -> int:
    sums(world)
    return os.getpid()


# -- dead peers --------------------------------------------------------------------------------------------------------


def die(world: World, called: str, died: Path) -> tuple[str, float]:
    """Rank 1 dies before a collective; the others return the error they got and how long it took."""
    sums(world)
    if world.rank == 1:
        if called == "large":  # with orphaned data loader workers
            loader: Any = DataLoader(list(range(10**6)), num_workers=2, multiprocessing_context="fork")  # type: ignore[arg-type]
            batches = iter(loader)
            next(batches)
        died.write_text(str(time.time()))
        if called == "future":
            os.kill(os.getpid(), signal.SIGKILL)
        os._exit(0)
    errors = (RuntimeError,) if called == "future" else (CommunicationError,)  # C++ raises its own error type
    try:
        if called == "future":
            dist.all_reduce(torch.ones(7), async_op=True).get_future().wait()
        else:
            dist.all_reduce(torch.ones(3_000_000))
    except errors as error:
        took = time.time() - float(died.read_text())
        with pytest.raises(CommunicationError, match="cannot be used any longer, because rank 1"):
            sums(world)
        return str(error), took
    raise AssertionError("no error")


@pytest.mark.parametrize("called", ["large", "future"])
def test_a_dead_peer_is_named_before_the_timeout_even_if_its_workers_live(tmp_path: Path, called: str) -> None:
    with Ranks(3, 100, "paceline") as ranks:  # the group's timeout is 0.8 times that
        victim = ranks.run(pid)[1]
        ranks.start(die, called, tmp_path / "died")
        for rank in (0, 2):
            message, took = ranks.answer(rank, 90)
            assert re.search(rf"(^|: )rank {rank}: rank 1 \(pid {victim}\) has ended in ", message), message
            assert took < 40, took
        for process in Path("/proc").glob("[0-9]*"):  # workers that outlived rank 1
            with contextlib.suppress(OSError):
                if int((process / "stat").read_text().rpartition(")")[2].split()[2]) == victim:
                    os.kill(int(process.name), signal.SIGKILL)


# -- late peers --------------------------------------------------------------------------------------------------------


def impatient(world: World, seconds: float) -> int:
    """Set the group's timeout to `seconds` after a first collective; return the process id."""
    sums(world)
    dist.group.WORLD.set_timeout(timedelta(seconds=seconds))  # type: ignore[union-attr]
    return os.getpid()


def busy(world: World, enough: Path) -> int:
    rounds = 0
    going = torch.ones(1)
    while going.item():
        sums(world, 10_000)
        going.fill_(float(not enough.exists()))
        dist.broadcast(going, 0)
        rounds += 1
        if rounds == 10:
            enough.with_name(f"begun-{world.rank}").touch()
    return rounds


@pytest.mark.slow
def test_a_rank_stopped_for_less_than_the_timeout_raises_no_error(tmp_path: Path) -> None:
    with Ranks(2, backend="paceline") as ranks:
        pids = ranks.run(impatient, 3.0)
        ranks.start(busy, tmp_path / "enough")
        until(lambda: all((tmp_path / f"begun-{rank}").exists() for rank in range(2)))
        # If all ranks are stopped together, the pause may exceed the timeout, because no rank was waiting.
        for stopped, pause in (([1], 1.0), ([0, 1], 4.0)):
            for rank in stopped:
                os.kill(pids[rank], signal.SIGSTOP)
            time.sleep(pause)
            for rank in stopped:
                os.kill(pids[rank], signal.SIGCONT)
                time.sleep(0.3)
        (tmp_path / "enough").touch()
        for rank in range(2):
            ranks.answer(rank, 60)


# -- cleanup -----------------------------------------------------------------------------------------------------------


def holders() -> set[int]:
    """Return the processes that hold shared memory of Paceline, by descriptor or mapping."""
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            names = [os.readlink(descriptor) for descriptor in (process / "fd").iterdir()]
            if any("memfd:paceline" in name for name in names) or "memfd:paceline" in (process / "maps").read_text():
                found.add(int(process.name))
    return found


def hold(world: World) -> int:
    sums(world, 2_000_000)
    group: Any = dist.group.WORLD
    world_tensor = group.allocate(20_000_000, torch.float32).fill_(1.0)
    group.launch_all_reduce(world_tensor)
    return os.getpid()


def test_killing_all_ranks_leaves_no_resources_behind() -> None:
    before = [set(os.listdir(folder)) for folder in ("/dev/shm", "/tmp")]
    with Ranks(2, backend="paceline") as ranks:
        pids = set(ranks.run(hold))
        assert pids <= holders()
        for one in pids:
            os.kill(one, signal.SIGKILL)
        for process in ranks.processes:
            process.join(30)
    assert not pids & holders()
    ours = [set(os.listdir(folder)) - old for folder, old in zip(("/dev/shm", "/tmp"), before, strict=True)]
    left = {name for names in ours for name in names if "paceline" in name or any(str(pid) in name for pid in pids)}
    of_others = ("paceline-test-", "paceline-job-")  # of concurrent tests; these ranks have no launcher
    assert not {name for name in left if not name.startswith(of_others)}


def test_a_rank_missing_from_the_handshake_is_named_and_descriptors_are_closed() -> None:
    gc.collect()  # garbage of earlier tests may hold descriptors
    before = len(os.listdir("/proc/self/fd"))
    arena = Arena()
    for rank in range(2):
        with pytest.raises(CommunicationError, match=rf"rank {rank}: rank {1 - rank} did not arrive .* within 0\.2 s"):
            handshake.connect(HashStore(), rank, arena, timedelta(seconds=0.2), range(2))
    del arena
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize(
    ("error", "remedy"),
    [
        ("Resource temporarily unavailable", "no process or thread can be started; raise the limit of the user"),
        ("Too many open files", "the limit on open files, "),
        ("connection refused", "set GLOO_SOCKET_IFNAME"),
    ],
)
def test_a_limit_reached_inside_gloo_is_named(monkeypatch: pytest.MonkeyPatch, error: str, remedy: str) -> None:
    # A rank without threads was told to set GLOO_SOCKET_IFNAME.
    def fail(*_: object) -> None:
        raise RuntimeError(error)

    monkeypatch.setattr(gloo, "ProcessGroupGloo", fail)
    monkeypatch.setattr(gloo, "GRACE_S", 0)
    with pytest.raises(CommunicationError, match=f"rank 0: Gloo could not connect with rank 1.*{error}.*{remedy}"):
        gloo.connect_gloo(HashStore(), 0, 2, timedelta(seconds=5), range(2))


# -- different operations ----------------------------------------------------------------------------------------------


CHUNK = STAGE_BYTES // 4  # float32
Call = Callable[[], Any]


def reduces(count: int, op: Any = dist.ReduceOp.SUM, dtype: torch.dtype = torch.float32) -> Call:
    return lambda: dist.all_reduce(torch.ones(count, dtype=dtype), op)


def reduces_later(count: int) -> Call:
    return lambda: dist.all_reduce(torch.ones(count), async_op=True).wait()


def broadcasts(count: int, root: int = 0) -> Call:
    return lambda: dist.broadcast(torch.ones(count), root)


def gathers() -> None:
    dist.all_gather([torch.ones(3 * CHUNK)] * dist.get_world_size(), torch.ones(3 * CHUNK))


def scatters() -> None:
    dist.reduce_scatter(torch.ones(CHUNK), [torch.ones(CHUNK)] * dist.get_world_size())


DIFFERENT: list[tuple[Call, Call, str]] = [
    (reduces(8), broadcasts(8), r"all_reduce of 8 × float32 by SUM.*broadcast of 8 × float32 from rank 0"),
    (reduces(8), reduces(8, dtype=torch.int32), "8 × float32.*8 × int32"),
    (reduces(8), reduces(8, dist.ReduceOp.MAX), "by SUM.*by MAX"),
    (broadcasts(8), broadcasts(8, 1), "from rank 0.*from rank 1"),
    (reduces(100), reduces(5 * CHUNK), f"100 × float32.*{5 * CHUNK} × float32"),
    (dist.barrier, broadcasts(3 * CHUNK), "barrier; rank .*broadcast of"),
    (gathers, scatters, "all_gather of.*reduce_scatter of"),
    (reduces_later(3 * CHUNK), reduces_later(2), f"{3 * CHUNK} × float32.* 2 × float32"),
]


def works(world: World) -> None:
    """Check that the group still works, with small and large messages in both directions."""
    for count in (1, 3 * CHUNK + 5):
        sums(world, count)
    dist.barrier()


def differ(world: World) -> list[str]:
    messages = []
    for call, other, _ in DIFFERENT:
        with pytest.raises(DesyncError) as caught:
            (other if world.rank == 2 else call)()
        messages.append(str(caught.value))
        works(world)
    return messages


def test_a_mismatch_is_named_on_every_rank_and_the_group_still_works(pools: Pools) -> None:
    for rank, messages in enumerate(pools.run(3, differ)):
        for message, (*_, named) in zip(messages, DIFFERENT, strict=True):
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


# -- deadlocks ---------------------------------------------------------------------------------------------------------


NAP_S = 0.02
Group = tuple[int, ...]


def join(groups: dict[Group, Any], *ranks: int, count: int = 1) -> None:
    tensor = torch.ones(count)
    dist.all_reduce(tensor, group=groups[ranks])
    assert tensor.eq(len(ranks)).all()


def subgroups(world: World) -> dict[Group, Any]:
    """The groups of two or more ranks."""
    shm_engine._NAP_S = NAP_S  # ranks look for deadlocks often
    every = [ranks for size in range(2, world.size + 1) for ranks in combinations(range(world.size), size)]
    return {ranks: dist.new_group(list(ranks)) for ranks in every}


def train(model: nn.Module) -> None:
    model(torch.ones(2, 3)).sum().backward()


def cross(world: World, case: str) -> str:
    """Return the error of ranks that wait for each other."""
    groups, model = subgroups(world), DistributedDataParallel(nn.Linear(3, 2))
    train(model)
    rank, following = world.rank, tuple(sorted((world.rank, (world.rank + 1) % world.size)))
    calls: dict[str, Callable[[], object]] = {
        "an evaluation": lambda: train(model) if rank else dist.all_reduce(torch.ones(1)),
        "a large tensor": lambda: train(model) if rank else dist.all_reduce(torch.ones(3_000_000)),
        "an asynchronous sum": lambda: train(model) if rank else dist.all_reduce(torch.ones(1), async_op=True).wait(),
        "a circle of groups": lambda: join(groups, *following),
    }
    with pytest.raises(DesyncError) as caught:
        calls[case]()
    with pytest.raises(CommunicationError, match="cannot be used any longer, because ranks wait for each other"):
        dist.barrier()
    return str(caught.value)


@pytest.mark.parametrize("case", ["an evaluation", "a large tensor", "an asynchronous sum", "a circle of groups"])
def test_every_deadlocked_rank_names_the_operations(case: str) -> None:
    for rank, message in enumerate(run_ranks(3, cross, case, timeout=60, backend="paceline")):
        assert message.startswith(f"rank {rank}: ranks wait for each other in different operations (rank"), message
        places = re.findall(rf"(ranks? [\d, ]+): [\w ]*all_reduce of [^(]* \({__file__}, line \d+\)", message)
        named = {*re.findall(r"\d", " ".join(places))}
        # Two ranks already form a deadlock without the third. A cycle of groups needs all three.
        third = {"12"[rank == 1]} if "circle" in case else set()
        assert named >= {"0", str(rank)} | third, message
        assert len(named) >= 2, message


def no_deadlock(world: World, seed: int) -> None:
    """Join random groups in the same order on all ranks, often waiting for a late one."""
    groups, order, delays = subgroups(world), random.Random(seed), random.Random(f"{seed} {world.rank}")
    for _ in range(150):
        ranks = order.choice(list(groups))
        count = order.choice([1, 10, 20_000])
        if world.rank in ranks:
            time.sleep(delays.choice([0, 0, 0, 0, 3 * NAP_S]))
            join(groups, *ranks, count=count)
    dist.barrier()


@pytest.mark.parametrize("seed", range(2))
def test_waiting_for_a_late_rank_in_several_groups_is_not_a_deadlock(seed: int) -> None:
    run_ranks(4, no_deadlock, seed, backend="paceline")


def stopped(world: World, pids: Path) -> None:
    """Rank 0 waits for rank 1 and is stopped; meanwhile rank 1 releases it and waits for it in another operation."""
    groups = subgroups(world)
    (pids / str(world.rank)).write_text(str(os.getpid()))
    dist.barrier()
    if world.rank < 2:
        time.sleep(world.rank * 20 * NAP_S)
        join(groups, 0, 1)
    else:
        time.sleep(10 * NAP_S)
        os.kill(int((pids / "0").read_text()), signal.SIGSTOP)
        time.sleep(40 * NAP_S)
        os.kill(int((pids / "0").read_text()), signal.SIGCONT)
    join(groups, 0, 1, 2)


def test_a_stopped_rank_that_could_continue_is_not_in_a_deadlock(tmp_path: Path) -> None:
    run_ranks(3, stopped, tmp_path, backend="paceline")


def threads(world: World) -> None:
    """Main threads wait for each other's second thread, which is computing, and vice versa."""
    groups = subgroups(world)
    groups |= {(0, 1, number): dist.new_group() for number in range(2)}

    def run(number: int) -> None:
        for _ in range(20):
            time.sleep(10 * NAP_S * (number == world.rank))
            dist.all_reduce(torch.ones(1), group=groups[0, 1, number])

    other = threading.Thread(target=run, args=(1,))
    other.start()
    run(0)
    other.join()
    dist.barrier()


def test_threads_waiting_in_separate_groups_are_not_in_a_deadlock() -> None:
    run_ranks(2, threads, backend="paceline")
