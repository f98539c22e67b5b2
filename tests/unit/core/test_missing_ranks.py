"""Missing ranks: constructors and collectives that only some ranks enter time out and name the absent ranks."""

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
from insides import LOOPBACK, TIMEOUT, loopback_store, missing_ranks, open_own_group, stores
from paceline import World, init
from paceline.errors import CommunicationError, PacelineError, UsageError, WorldError
from processes import until
from ranks import TIMEOUT_S, Ranks

PATIENCE_S = 2.0
ABSENT = 2


def wait_for_marks(present: set[int]) -> None:
    """Make this rank always wait for the marks of the `present` ranks, and only for those."""
    look = missing_ranks.missing_from

    def missing_from(store: Any, keys: Sequence[str], seconds: float = 0) -> list[int]:
        look(store, [key for rank, key in enumerate(keys) if rank in present], 60)
        return look(store, keys)

    missing_ranks.missing_from = missing_from


def impatient() -> dist.ProcessGroup:
    """Return a group of all ranks with a short timeout; the world gets the same, for calls that take no group."""
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
    """Rank 2 stays away; the others return the error, which must be raised in time."""
    model = paceline.DistributedDataParallel(nn.Linear(2, 2))
    model(torch.ones(1, 2)).sum().backward()  # triggers lazy imports
    call = prepare(impatient(), folder)
    dist.barrier()
    Path(folder, "met").touch()
    markers = [Path(folder, f"done-{rank}") for rank in range(world.size) if rank != ABSENT]
    if world.rank == ABSENT:
        until(lambda: all(file.exists() for file in markers))  # alive but elsewhere
        return ""
    start = time.monotonic()
    with pytest.raises(CommunicationError) as caught:
        call()
    assert time.monotonic() - start < PATIENCE_S + 50, "the absent rank came back before the timeout"
    assert caught.value.blamed == (ABSENT,)
    markers[world.rank].touch()
    return str(caught.value)


CALLS = {
    (wrap, "paceline"): r"in DistributedDataParallel\(…\), which every rank .*: rank 2 did not arrive .* within 2",
    (train, "gloo"): "all-reduce of gradient bucket 0|shared all_reduce",
    (normalize, "paceline"): "SyncBatchNorm|all_gather",
    (save, "paceline"): r"in Checkpointer\.save\(\), which every rank must call",
    (gather, "gloo"): r"in gather_for_metrics\(\), which every rank must call",
}


@pytest.mark.slow
def test_an_absent_rank_is_named_with_the_operation(tmp_path: Path) -> None:
    """Gloo's own errors name no rank: «Timed out waiting 700ms for recv operation to complete»."""
    with ExitStack() as stack:
        worlds = []
        for prepare, backend in CALLS:  # worlds start one by one and wait concurrently
            folder = tmp_path / prepare.__name__
            folder.mkdir()
            worlds.append(stack.enter_context(Ranks(3, 60, backend)))
            worlds[-1].start(stay_away, prepare, str(folder))
            until((folder / "met").exists)
        for ranks, doing in zip(worlds, CALLS.values(), strict=True):
            for rank in (0, 1):
                message = ranks.answer(rank, 60)
                assert message.startswith(f"rank {rank}: ")
                assert "rank 2" in message
                assert "see the error of that rank" in message
                assert re.search(doing, message), message


def freeze(world: World) -> str:
    model = nn.Linear(2, 2).requires_grad_(world.rank != 1)
    group = dist.new_group(timeout=timedelta(seconds=PATIENCE_S))
    with pytest.raises(PacelineError) as caught:
        paceline.DistributedDataParallel(model, process_group=group)
    # The group is still unused, so once the rank is fixed, the next attempt works.
    model.requires_grad_(True)
    dist.barrier()
    wrapped = paceline.DistributedDataParallel(model)
    wrapped(torch.ones(1, 2)).sum().backward()
    return str(caught.value)


@pytest.mark.slow
def test_a_rank_with_all_parameters_frozen_is_named() -> None:
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
    message = "the all-reduce of gradient bucket 0 failed, because rank 1 ended"
    with pytest.raises(CommunicationError, match=message) as caught:
        model(torch.ones(1, 2)).sum().backward()
    assert caught.value.blamed == (1,)
    return "named"


def test_other_ranks_name_a_rank_that_died_on_gloo() -> None:
    with Ranks(3, backend="gloo") as ranks:
        ranks.start(die)
        for rank in (0, 2):
            assert ranks.answer(rank, TIMEOUT_S) == "named"


@pytest.mark.ranks(2, backend="gloo")
def test_a_failure_of_all_ranks_blames_none() -> None:
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
    """Let only these ranks of a world of `size` join; yield a function that returns their error messages."""
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

    def receive() -> list[str]:
        assert all(pipe.poll(60) for pipe in pipes), "a rank hangs"
        return [pipe.recv() for pipe in pipes]

    with in_processes(join, ranks, environment, backend) as pipes:
        for pipe in pipes:  # they start together even on a busy machine
            assert pipe.recv() == "here"
        for pipe in pipes:
            pipe.send("join")
        yield receive


@pytest.mark.slow
def test_a_rank_that_never_joins_is_named_whichever_process_serves_the_store() -> None:
    """torch reports «2/3 clients joined» or a missing key. `PACELINE_TIMEOUT` sets the timeout here."""
    with ExitStack() as stack:
        worlds = [
            stack.enter_context(joining([0, 1], 3, backend, served_by, patience="3"))
            for backend in ("paceline", "gloo")
            for served_by in ("launcher", "rank 0")
        ]
        for rank, text in (each for receive in worlds for each in enumerate(receive())):
            assert text.startswith(f"CommunicationError rank {rank}: rank 2 did not arrive to create the process"), text
            assert "within 3 s" in text


def test_a_late_answer_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0's timeout ends a moment after rank 1's, so its answer to rank 1 comes late."""
    monkeypatch.setattr(stores, "GRACE_S", 60)
    store = dist.HashStore()
    asked = PrefixStore("meeting/", store)
    messages: list[str] = []

    def ask() -> None:
        with pytest.raises(CommunicationError) as caught:
            stores.meet(store, 1, 3, timedelta(milliseconds=1))
        messages.append(str(caught.value))

    rank = threading.Thread(target=ask)
    rank.start()
    asked.wait(["asked/1/1"], timedelta(seconds=60))
    asked.add("answered/1", 1)
    time.sleep(0.2)  # rank 1's timeout has passed
    asked.set("answer/1/1", "1 missing 2")
    rank.join(60)
    assert messages[0].startswith("rank 1: rank 2 did not arrive to create the process group within")


def test_a_store_that_rank_0_does_not_serve_is_reported() -> None:
    with joining([1], 2, "gloo", "rank 0", patience="0.5") as receive:
        (message,) = receive()
    expected = (
        r"rank 1: the store at 127\.0\.0\.1:.*, which rank 0 serves, was not reached after \d+\.\d s \(.*\); check "
    )
    assert re.search(expected, message)


def test_a_port_in_use_is_named_immediately(monkeypatch: pytest.MonkeyPatch) -> None:
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
def test_too_few_descriptors_are_refused_everywhere_and_the_named_number_suffices(world: World) -> None:
    """Otherwise that rank fails in Gloo or the handshake, and the others wait for it until their timeout."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    first = paceline.DistributedDataParallel(nn.Linear(2, 2))  # also imports modules that take a descriptor
    for free in (0, 20, 21):
        if world.rank == 1:
            # The lowest free numbers are used first, so gaps in the used ones provide no extra descriptors.
            resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) - 1 + free, limits[1]))
        few = f"^rank {world.rank}: a process group of 2 ranks takes up to 21 file descriptors, but rank 1 has {free} "
        refused = pytest.raises(UsageError, match=few + ".*; raise its limit with 'ulimit -n 1024'")
        with refused if free < 21 else nullcontext():
            paceline.DistributedDataParallel(nn.Linear(2, 2))
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    del first


def connect_late(rank: int, environment: dict[str, str], backend: str, slow: tuple[str, str], pipe: Any) -> None:
    """Connect as one of three ranks, the last one slow; send when it had connected and when init() returned."""
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
def test_no_rank_returns_before_all_are_connected(backend: str, slow: tuple[str, str]) -> None:
    # A script that ended right after init() closed connections while other ranks were still connecting.
    store = loopback_store()
    environment = {"WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "3", "MASTER_ADDR": LOOPBACK, "MASTER_PORT": str(store.port)}
    environment |= {"TORCHELASTIC_USE_AGENT_STORE": "True", TIMEOUT: "60"}
    with in_processes(connect_late, range(3), environment, backend, slow) as pipes:
        assert all(pipe.poll(60) for pipe in pipes)
        times = [pipe.recv() for pipe in pipes]
    assert min(ready for _, ready in times) >= max(connected for connected, _ in times)


def test_connected_ranks_name_a_rank_that_cannot_connect() -> None:
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
