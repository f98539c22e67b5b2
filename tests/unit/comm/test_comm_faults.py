"""Peers that die, stop or arrive late, and cleanup after all ranks are killed."""

from __future__ import annotations

import contextlib
import gc
import os
import re
import signal
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore
from torch.utils.data import DataLoader

from paceline.comm import handshake
from paceline.comm.shm_arena import Arena
from paceline.core.world import World
from paceline.errors import CommunicationError
from processes import until
from ranks import Ranks


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
    with pytest.raises(CommunicationError, match=r"rank 0: rank 1 did not arrive .* within 0\.2 s"):
        handshake.connect(HashStore(), 0, arena, timedelta(seconds=0.2), range(2))
    with pytest.raises(CommunicationError, match=r"rank 1: rank 0 did not arrive .* within 0\.2 s"):
        handshake.connect(HashStore(), 1, arena, timedelta(seconds=0.2), range(2))
    del arena
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before
