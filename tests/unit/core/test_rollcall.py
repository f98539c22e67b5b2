"""Who did not come: constructions and collectives that only some ranks enter end by the timeout and name the others."""

from __future__ import annotations

import importlib
import os
import re
import resource
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import PrefixStore

import paceline
from forked import in_processes
from paceline.comm.own_group import open_own_group
from paceline.core import missing_ranks, stores
from paceline.core.world import TIMEOUT, World, init
from paceline.errors import CommunicationError, PacelineError, UsageError, WorldError
from paceline.launch.job import LOOPBACK, loopback_store
from processes import until
from ranks import TIMEOUT_S, Ranks

PATIENCE_S = 2.0
ABSENT = 2


def wait_for_marks(present: set[int]) -> None:
    """Have this rank wait for the marks of the `present` ranks however busy the machine is, and not for others."""
    look = missing_ranks.missing_from

    def missing_from(store: Any, keys: Sequence[str], seconds: float = 0) -> list[int]:
        look(store, [key for rank, key in enumerate(keys) if rank in present], 60)
        return look(store, keys)

    missing_ranks.missing_from = missing_from


def impatient() -> dist.ProcessGroup:
    """A group of all ranks that waits for a moment only; so does the world, for what takes no group."""
    patience = timedelta(seconds=PATIENCE_S)
    wait_for_marks(set(range(dist.get_world_size())) - {ABSENT})
    group: Any = dist.new_group(timeout=patience)
    world: Any = dist.group.WORLD
    world.set_timeout(patience)
    return group  # type: ignore[no-any-return]


def wrap(group: Any, folder: str) -> Callable[[], Any]:
    return lambda: paceline.DistributedDataParallel(nn.Linear(2, 2), process_group=group)


def train(group: Any, folder: str) -> Callable[[], Any]:
    model = paceline.DistributedDataParallel(nn.Linear(2, 2), process_group=group)
    return lambda: model(torch.ones(1, 2)).sum().backward()


def normalize(group: Any, folder: str) -> Callable[[], Any]:
    layer = paceline.SyncBatchNorm(2)
    layer(torch.ones(2, 2))
    return lambda: layer(torch.ones(2, 2))


def save(group: Any, folder: str) -> Callable[[], Any]:
    checkpointer = paceline.Checkpointer(folder)
    checkpointer.register("model", nn.Linear(2, 2))
    return lambda: checkpointer.save(1)


def gather(group: Any, folder: str) -> Callable[[], Any]:
    return lambda: paceline.gather_for_metrics(torch.ones(2))


def stay_away(world: World, prepare: Callable[..., Callable[[], Any]], folder: str) -> str:
    """Rank 2 does not come; what the others are told, and it comes in time."""
    model = paceline.DistributedDataParallel(nn.Linear(2, 2))
    model(torch.ones(1, 2)).sum().backward()  # imports what is imported late
    call = prepare(impatient(), folder)
    dist.barrier()
    Path(folder, "met").touch()
    told = [Path(folder, f"told-{rank}") for rank in range(world.size) if rank != ABSENT]
    if world.rank == ABSENT:
        deadline = time.monotonic() + PATIENCE_S + 60
        while not all(file.exists() for file in told) and time.monotonic() < deadline:
            time.sleep(0.02)  # alive, and elsewhere
        return ""
    start = time.monotonic()
    with pytest.raises(CommunicationError) as caught:
        call()
    assert time.monotonic() - start < PATIENCE_S + 50, "the absent rank came back before the timeout"
    assert caught.value.blamed == (ABSENT,)
    told[world.rank].touch()
    return str(caught.value)


CALLS = {
    (
        wrap,
        "paceline",
    ): r"in DistributedDataParallel\(…\), which every rank .*: rank 2 did not arrive .* within 2 s",
    (train, "gloo"): "all-reduce of gradient bucket 0|shared all_reduce",
    (normalize, "paceline"): "SyncBatchNorm|all_gather",
    (save, "paceline"): r"in Checkpointer\.save\(\), which every rank must call",
    (gather, "gloo"): r"in gather_for_metrics\(\), which every rank must call",
}


@pytest.mark.slow
def test_a_rank_that_does_not_come_is_named_with_what_was_done(tmp_path: Path) -> None:
    """Gloo's own errors name nobody: «Timed out waiting 700ms for recv operation to complete»."""
    with ExitStack() as stack:
        worlds = []
        for prepare, backend in CALLS:  # worlds start in turns, and wait for their rank at the same time
            folder = tmp_path / prepare.__name__
            folder.mkdir()
            worlds.append(stack.enter_context(Ranks(3, 60, backend)))
            worlds[-1].start(stay_away, prepare, str(folder))
            until((folder / "met").exists)
        for ranks, doing in zip(worlds, CALLS.values(), strict=True):
            for rank in (0, 1):
                told = ranks.answer(rank, 60)
                assert told.startswith(f"rank {rank}: ")
                assert "rank 2" in told
                assert "see the error of that rank" in told
                assert re.search(doing, told), told


def freeze(world: World) -> str:
    model = nn.Linear(2, 2).requires_grad_(world.rank != 1)
    group = dist.new_group(timeout=timedelta(seconds=PATIENCE_S))
    with pytest.raises(PacelineError) as caught:
        paceline.DistributedDataParallel(model, process_group=group)
    # Nobody has used the group: once the rank is mended, the next attempt works.
    model.requires_grad_(True)
    dist.barrier()
    wrapped = paceline.DistributedDataParallel(model)
    wrapped(torch.ones(1, 2)).sum().backward()
    return str(caught.value)


@pytest.mark.slow
def test_a_rank_on_which_all_is_frozen_is_missed_by_name() -> None:
    with Ranks(2, 60, "paceline") as ours, Ranks(2, 60, "gloo") as gloos:
        for ranks in (ours, gloos):
            ranks.start(freeze)
        for ranks in (ours, gloos):
            assert "no parameter that requires a gradient" in ranks.answer(1, 60)
            assert "rank 1 did not arrive" in ranks.answer(0, 60)


def die(world: World) -> str:
    model = paceline.DistributedDataParallel(nn.Linear(2, 2))
    wait_for_marks({0, 2})
    dist.barrier()
    if world.rank == 1:
        os._exit(3)
    with pytest.raises(
        CommunicationError, match="the all-reduce of gradient bucket 0 failed, because rank 1 ended"
    ) as caught:
        model(torch.ones(1, 2)).sum().backward()
    assert caught.value.blamed == (1,)
    return "named"


def test_a_rank_that_dies_on_gloo_is_named_by_all_others() -> None:
    with Ranks(3, backend="gloo") as ranks:
        ranks.start(die)
        for rank in (0, 2):
            assert ranks.answer(rank, TIMEOUT_S) == "named"


@pytest.mark.ranks(2, backend="gloo")
def test_a_failure_of_all_ranks_alike_blames_none() -> None:
    message = r"the sum failed on all of ranks 0, 1 \(Invalid scalar type\)"
    with pytest.raises(CommunicationError, match=message), missing_ranks.collective("sum"):
        raise RuntimeError("Invalid scalar type")


# -- joining the world -------------------------------------------------------------------------------------------------


def join(rank: int, environment: dict[str, str], backend: str, pipe: Any) -> None:
    os.environ.update(environment, RANK=str(rank), LOCAL_RANK=str(rank))
    pipe.send("here")
    pipe.recv()
    try:
        init(backend)
    except Exception as error:
        pipe.send(f"{type(error).__name__} {error}")


@contextmanager
def joining(
    ranks: list[int], size: int, backend: str, served_by: str, patience: str
) -> Iterator[Callable[[], list[str]]]:
    """Have these ranks of `size` join alone; yields what returns the words that they are told."""
    store = loopback_store() if served_by == "launcher" else None
    with socket.socket() as free:
        free.bind((LOOPBACK, 0))
        port = free.getsockname()[1] if store is None else store.port
    environment = {
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": LOOPBACK,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": str(store is not None),
        TIMEOUT: patience,
    }

    def told() -> list[str]:
        assert all(pipe.poll(60) for pipe in pipes), "a rank hangs"
        return [pipe.recv() for pipe in pipes]

    with in_processes(join, ranks, environment, backend) as pipes:
        for pipe in pipes:  # they start together, however busy the machine is
            assert pipe.recv() == "here"
        for pipe in pipes:
            pipe.send("join")
        yield told


@pytest.mark.slow
def test_a_rank_that_never_joins_is_named_whoever_serves_the_store() -> None:
    """torch says «2/3 clients joined», or which key is missing. `PACELINE_TIMEOUT` is the patience, here."""
    with ExitStack() as stack:
        worlds = [
            stack.enter_context(joining([0, 1], 3, backend, served_by, patience="3"))
            for backend in ("paceline", "gloo")
            for served_by in ("launcher", "rank 0")
        ]
        for rank, said in (each for told in worlds for each in enumerate(told())):
            assert said.startswith(f"CommunicationError rank {rank}: rank 2 did not arrive to create the process"), said
            assert "within 3 s" in said


def test_an_answer_that_comes_when_the_time_is_over_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0's time ends a moment later than that of rank 1, which it has counted as answered by then."""
    monkeypatch.setattr(stores, "GRACE_S", 60)
    store = dist.HashStore()
    asked = PrefixStore("meeting/", store)
    told: list[str] = []

    def ask() -> None:
        with pytest.raises(CommunicationError) as caught:
            stores.meet(store, 1, 3, timedelta(milliseconds=1))
        told.append(str(caught.value))

    rank = threading.Thread(target=ask)
    rank.start()
    asked.wait(["asked/1/1"], timedelta(seconds=60))
    asked.add("answered/1", 1)
    time.sleep(0.2)  # rank 1's time is over
    asked.set("answer/1/1", "1 missing 2")
    rank.join(60)
    assert [line.partition(" within")[0] for line in told] == [
        "rank 1: rank 2 did not arrive to create the process group"
    ]


def test_a_store_that_rank_0_does_not_serve_is_said_so() -> None:
    with joining([1], 2, "gloo", "rank 0", patience="0.5") as told_to:
        (told,) = told_to()
    assert "rank 1: the store at 127.0.0.1:" in told
    assert re.search(
        r"which rank 0 serves, was not reached after \d+\.\d s \(.*\); check address, port and firewall", told
    )


def test_a_port_in_use_is_named_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    with socket.create_server((LOOPBACK, 0)) as taken:
        port = taken.getsockname()[1]
        began = time.monotonic()
        with pytest.raises(CommunicationError, match=f"{port} .MASTER_ADDR, MASTER_PORT. could not be opened .*in use"):
            missing_ranks.open_store(LOOPBACK, port, 0, 2, timedelta(seconds=60))
        assert time.monotonic() - began < 30


def test_a_bad_timeout_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for argument in (0, -1.0, True, float("nan"), timedelta(0), "10 minutes"):
        with pytest.raises(WorldError, match=r"timeout=.* is not a timeout"):
            init(timeout=argument)  # type: ignore[arg-type]
    for variable in ("", "soon", "-3", "inf", "1e300"):
        monkeypatch.setenv(TIMEOUT, variable)
        with pytest.raises(UsageError, match=r"PACELINE_TIMEOUT=.* is not a timeout"):
            init()


def test_an_explicit_timeout_wins_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TIMEOUT, "never")
    with init(timeout=5):
        assert dist.group.WORLD.timeout == timedelta(seconds=5)  # type: ignore[union-attr]
    monkeypatch.setenv(TIMEOUT, "7.5")
    with init():
        assert dist.group.WORLD.timeout == timedelta(seconds=7.5)  # type: ignore[union-attr]


# -- descriptors -------------------------------------------------------------------------------------------------------


@pytest.mark.ranks(2)
def test_too_few_descriptors_are_refused_by_every_rank_at_once_and_as_many_as_named_suffice(world: World) -> None:
    """Otherwise that rank ends somewhere in Gloo or the handshake, and the others wait for it until their timeout."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    first = paceline.DistributedDataParallel(nn.Linear(2, 2))  # imports what takes a descriptor, too
    for free in (0, 20, 21):
        if world.rank == 1:
            # The lowest free numbers count, so that a gap in those in use gives no more.
            resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) - 1 + free, limits[1]))
        few = f"^rank {world.rank}: a process group of 2 ranks takes up to 21 file descriptors, but rank 1 has {free} "
        refused = pytest.raises(UsageError, match=few + ".*; raise its limit with 'ulimit -n 1024'")
        with refused if free < 21 else nullcontext():
            paceline.DistributedDataParallel(nn.Linear(2, 2))
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    del first


def connect_late(rank: int, environment: dict[str, str], backend: str, slow: tuple[str, str], pipe: Any) -> None:
    """A rank of three, of which the last one takes a moment longer to connect; sends when it had, and when all had."""
    os.environ.update(environment, RANK=str(rank), LOCAL_RANK=str(rank))
    module, name = importlib.import_module(slow[0]), slow[1]
    connect = getattr(module, name)
    connected = 0.0

    def late(*arguments: Any, **options: Any) -> Any:
        nonlocal connected
        made = connect(*arguments, **options)
        time.sleep(0.3 if rank == 2 else 0)
        connected = time.monotonic()
        return made

    setattr(module, name, late)
    init(backend)
    if name == "open_group":
        open_own_group(dist.group.WORLD, backend, None)  # type: ignore[arg-type]
    pipe.send((connected, time.monotonic()))
    pipe.recv()


@pytest.mark.parametrize(
    ("backend", "slow"),
    [
        ("gloo", ("torch.distributed", "init_process_group")),
        ("paceline", ("paceline.comm.process_group", "open_engine")),
        ("gloo", ("paceline.comm.own_group", "open_group")),
    ],
    ids=["init", "shared memory", "group of a wrapper"],
)
def test_no_rank_leaves_before_all_are_connected(backend: str, slow: tuple[str, str]) -> None:
    # A script that ended right after init() closed connections while other ranks were still connecting.
    store = loopback_store()
    environment = {"WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "3", "MASTER_ADDR": LOOPBACK, "MASTER_PORT": str(store.port)}
    environment |= {"TORCHELASTIC_USE_AGENT_STORE": "True", TIMEOUT: "60"}
    with in_processes(connect_late, range(3), environment, backend, slow) as pipes:
        assert all(pipe.poll(60) for pipe in pipes)
        times = [pipe.recv() for pipe in pipes]
    assert min(ready for _, ready in times) >= max(connected for connected, _ in times)


def test_a_rank_that_cannot_connect_is_named_to_those_that_can() -> None:
    store = dist.HashStore()

    def fail() -> None:
        with pytest.raises(ZeroDivisionError), stores.connecting(store, 1, 2, timedelta(seconds=30)):
            raise ZeroDivisionError

    thread = threading.Thread(target=fail)
    thread.start()
    refused = pytest.raises(CommunicationError, match="rank 0: rank 1 could not connect with the others")
    with refused, stores.connecting(store, 0, 2, timedelta(seconds=30)):
        pass
    thread.join()
