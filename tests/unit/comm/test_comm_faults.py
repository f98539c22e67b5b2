"""Peers that die, stop or come late; strangers at the door; what is left behind when all are killed."""

from __future__ import annotations

import contextlib
import gc
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from paceline.comm import topology
from paceline.comm.shm import handshake
from paceline.comm.shm.arena import Arena
from paceline.core.processes.world import World
from paceline.core.torch_internals.distributed.c10d import HashStore
from paceline.errors import CommunicationError
from paceline.launch.loopback import LOOPBACK, loopback_store
from processes import until
from ranks import Ranks, run_ranks


def sums(world: World, count: int = 1000) -> None:
    tensor = torch.full((count,), float(world.rank + 1))
    dist.all_reduce(tensor)
    assert tensor.eq(sum(range(1, world.size + 1))).all()


def pid(world: World) -> int:
    sums(world)
    return os.getpid()


# -- peers that end ----------------------------------------------------------------------------------------------------


def die(world: World, how: str, workers: int, called: str) -> tuple[str, float, int]:
    """Rank 1 ends before a collective; the others say what they see, and how long after."""
    sums(world)
    if world.rank == 1:
        batches: Any = None
        if workers:
            batches = iter(DataLoader(list(range(10**6)), num_workers=workers, multiprocessing_context="fork"))  # type: ignore[arg-type]
            next(batches)
        Path(os.environ["DIED"]).write_text(str(time.time()))
        if how == "SIGKILL":
            os.kill(os.getpid(), signal.SIGKILL)
        os._exit(0)
    call: dict[str, Callable[[], Any]] = {
        "large": lambda: dist.all_reduce(torch.ones(3_000_000)),
        "future": lambda: dist.all_reduce(torch.ones(7), async_op=True).get_future().wait(),
        "barrier": dist.barrier,
    }
    errors = (RuntimeError,) if called == "future" else (CommunicationError,)  # C++ makes an error of its own
    try:
        call[called]()
    except errors as error:
        took = time.time() - float(Path(os.environ["DIED"]).read_text())
        with pytest.raises(CommunicationError, match="cannot be used any longer, because rank 1"):
            sums(world)
        return str(error), took, world.rank
    raise AssertionError("no error")


@pytest.mark.parametrize(
    ("how", "workers", "called"),
    [
        ("SIGKILL", 0, "large"),
        ("SIGKILL", 0, "future"),
        ("exit", 2, "barrier"),
    ],
)
def test_a_dead_peer_is_named_long_before_the_timeout_also_while_its_workers_live(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str, workers: int, called: str
) -> None:
    died = tmp_path / "died"
    with Ranks(3, 100, "paceline") as ranks:  # the group's timeout is 0.8 of that
        victim = ranks.run(pid)[1]
        ranks.run(setenv, "DIED", str(died))
        ranks.start(die, how, workers, called)
        for rank in (0, 2):
            said, took, _ = ranks.answer(rank, 90)
            assert re.search(rf"(^|: )rank {rank}: rank 1 \(pid {victim}\) has ended in ", said), said
            assert took < 40, took
        for process in Path("/proc").glob("[0-9]*"):  # workers that outlived rank 1
            with contextlib.suppress(OSError):
                if int((process / "stat").read_text().rpartition(")")[2].split()[2]) == victim:
                    os.kill(int(process.name), signal.SIGKILL)


def setenv(world: World, name: str, value: str) -> None:
    os.environ[name] = value


# -- peers that are late -----------------------------------------------------------------------------------------------


def impatient(world: World, seconds: float) -> int:
    """Wait for a rank no longer than that, once both are there."""
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
@pytest.mark.parametrize("stopped", [[1], [0, 1]])
def test_a_rank_that_is_stopped_for_less_than_the_timeout_raises_no_alarm(stopped: list[int], tmp_path: Path) -> None:
    with Ranks(2, backend="paceline") as ranks:
        pids = ranks.run(impatient, 8.0)
        ranks.start(busy, tmp_path / "enough")
        until(lambda: all((tmp_path / f"begun-{rank}").exists() for rank in range(2)))
        # All stopped together, they may stay so for longer than the timeout: nobody was waited for meanwhile.
        pause = 2.0 if len(stopped) == 1 else 9.0
        for rank in stopped:
            os.kill(pids[rank], signal.SIGSTOP)
        time.sleep(pause)
        for rank in stopped:
            os.kill(pids[rank], signal.SIGCONT)
            time.sleep(0.3)
        (tmp_path / "enough").touch()
        for rank in range(2):
            ranks.answer(rank, 60)


# -- strangers ---------------------------------------------------------------------------------------------------------


def strange(world: World) -> int:
    """Make a group while strangers knock at every socket of ours that there is."""
    done = threading.Event()
    knocks = torch.zeros(1)
    held: list[socket.socket] = []
    kinds = cycle(["random bytes", "huge", "silent", "wrong secret"])

    def run() -> None:
        while not done.is_set():
            knocks.add_(knock(next(kinds), held))
            time.sleep(0.0005)

    def is_visited() -> bool:
        total = knocks.clone()
        dist.all_reduce(total)
        return bool(total > 0)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        turns = 0
        while turns < 12 or not is_visited():
            turns += 1
            group = dist.new_group(list(range(world.size)))
            tensor = torch.full((100,), float(world.rank + 1))
            dist.all_reduce(tensor, group=group)
            assert tensor.eq(sum(range(1, world.size + 1))).all()
            assert group.native  # type: ignore[attr-defined]
            dist.destroy_process_group(group)
    finally:
        done.set()
        thread.join()
        for link in held:
            link.close()
    return int(knocks)


def knock(kind: str, held: list[socket.socket]) -> int:
    knocks = 0
    for line in Path("/proc/net/unix").read_text().splitlines():
        if "@paceline/" not in line:
            continue
        with contextlib.suppress(OSError):
            link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            link.setblocking(False)
            link.connect("\0" + line.rpartition("@")[2])
            knocks += 1
            if kind == "random bytes":
                link.send(os.urandom(48))
            elif kind == "huge":
                link.send(b"\xff" * 200_000)
            elif kind == "wrong secret":
                read, write = os.pipe()
                socket.send_fds(link, [bytes(32) + bytes(16)], [read, write, read, write])
                os.close(read)
                os.close(write)
            elif kind == "silent" and len(held) < 100:
                held.append(link)
                continue
            link.close()
    return knocks


@pytest.mark.slow
def test_strangers_at_the_socket_change_nothing() -> None:
    assert sum(run_ranks(3, strange, backend="paceline")) > 0


# -- what is left ------------------------------------------------------------------------------------------------------


def holders() -> set[int]:
    """Processes that hold a memory of ours, by descriptor or mapping."""
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


def test_nothing_is_left_when_all_ranks_are_killed() -> None:
    before = [set(os.listdir(folder)) for folder in ("/dev/shm", "/tmp")]
    with Ranks(3, backend="paceline") as ranks:
        pids = set(ranks.run(hold))
        assert pids <= holders()
        for one in pids:
            os.kill(one, signal.SIGKILL)
        for process in ranks.processes:
            process.join(30)
    assert not pids & holders()
    ours = [set(os.listdir(folder)) - old for folder, old in zip(("/dev/shm", "/tmp"), before, strict=True)]
    left = {name for names in ours for name in names if "paceline" in name or any(str(pid) in name for pid in pids)}
    of_others = ("paceline-test-", "paceline-job-")  # of tests beside this one; these ranks have no launcher
    assert not {name for name in left if not name.startswith(of_others)}


# -- where it cannot work ----------------------------------------------------------------------------------------------


def refuse(name: str, what: str, pipe: Any, rank: int, port: int) -> None:
    """A rank of its own making, on which the system refuses something."""
    import warnings

    import paceline  # noqa: F401

    if rank == 1:

        def refused(*_: Any) -> Any:
            raise PermissionError(1, f"{name} is forbidden here")

        if name == "platform":
            topology.sys = type("sys", (), {"platform": "darwin"})  # type: ignore[attr-defined]
        else:
            setattr(socket if name == "socket" else os, name, refused)
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR=LOOPBACK, MASTER_PORT=str(port))
    os.environ.update(TORCHELASTIC_USE_AGENT_STORE="True", GLOO_SOCKET_IFNAME="lo")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        dist.init_process_group("paceline", timeout=timedelta(seconds=20))
    tensor = torch.full((5,), float(rank + 1))
    dist.all_reduce(tensor)
    group: Any = dist.group.WORLD
    pipe.send(([str(one.message) for one in caught], tensor.tolist(), group.native, group.getBackendName()))
    dist.barrier()


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("memfd_create", "rank 1: the system refuses it: [Errno 1] memfd_create is forbidden here"),
        ("platform", "rank 1: shared memory between ranks needs Linux, this is darwin"),
    ],
)
def test_one_rank_that_cannot_share_memory_makes_all_use_gloo_and_rank_0_says_why(name: str, said: str) -> None:
    from ranks import fork_server

    store = loopback_store()
    pipes = []
    for rank in range(2):
        ours, theirs = fork_server.Pipe()
        process = fork_server.Process(target=refuse, args=(name, said, theirs, rank, store.port))
        process.start()
        pipes.append((ours, process))
    for rank, (pipe, process) in enumerate(pipes):
        assert pipe.poll(30)
        warned, result, native, backend = pipe.recv()
        assert warned == ([f"the process group uses Gloo, not shared memory: {said}"] if rank == 0 else [])
        assert (result, native, backend) == ([3.0] * 5, False, "paceline")
        process.join(30)
        assert process.exitcode == 0


def test_a_rank_that_never_comes_to_the_handshake_is_named_and_nothing_stays_open() -> None:
    gc.collect()  # what tests before this one left to be collected has descriptors, too
    before = len(os.listdir("/proc/self/fd"))
    arena = Arena()
    with pytest.raises(CommunicationError, match=r"rank 0: rank 1 did not arrive .* within 0\.2 s"):
        handshake.connect(HashStore(), 0, [1], arena, timedelta(seconds=0.2))
    with pytest.raises(CommunicationError, match=r"rank 1: rank 0 did not arrive .* within 0\.2 s"):
        handshake.connect(HashStore(), 1, [0], arena, timedelta(seconds=0.2))
    del arena
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before
