"""NCCL communicators of our groups, exposed time, and refusals during graph capture.

Without a GPU, fakes stand in for NCCL. Groups are destroyed by all ranks together or aborted, never by a finalizer."""

from __future__ import annotations

import gc
from contextlib import ExitStack
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import HashStore, ProcessGroup, ProcessGroupGloo

import paceline
from insides import (
    MOST_PENDING,
    SAMPLED,
    ExposedTime,
    GraphCapture,
    channel,
    channel_of,
    check_own_gpu,
    choose_gpu,
    extensions,
    get_known_groups,
    gpu_name,
    nccl_communicators,
    own_group,
    torch_distributed,
)
from insides import world as world_module
from paceline import World, compression
from paceline.compression import TopK
from paceline.ddp import DistributedDataParallel
from paceline.errors import UsageError, WorldError
from twins import Pools

on_two_ranks = pytest.mark.ranks(2, backend="gloo")


class PartsOfNccl:
    """The parts of NCCL's backend that Paceline uses."""

    def __init__(self, *, is_used: bool = True) -> None:
        self._is_initialized = lambda: is_used
        self._group_start = self._group_end = lambda: None


class Together:
    """A group that, like NCCL, waits for its other ranks when destroyed but not when aborted."""

    def __init__(self, group: Any, events: list[str]) -> None:
        self.group, self.events = group, events

    def shutdown(self) -> None:
        self.group.barrier().wait()
        self.events.append(f"destroyed {self.group.group_name}")
        self.group.shutdown()

    def abort(self) -> None:
        self.events.append(f"aborted {self.group.group_name}")
        self.group.shutdown()


def stand_in(*, is_used: bool = True) -> list[str]:
    """Let Gloo stand in for NCCL on this rank; return a log of what happens to communicators, by name."""
    events: list[str] = []

    def keep(group: Any, name: str, ranks: Any) -> None:
        nccl_communicators.opened[name] = nccl_communicators.Communicator(Together(group, events), tuple(ranks))

    nccl = PartsOfNccl(is_used=is_used)
    changed: Any = nccl_communicators
    changed.nccl_of = lambda _: nccl
    world_module.nccl_of = changed.nccl_of
    own_group.keep = keep
    return events


def wrap() -> DistributedDataParallel:
    model = DistributedDataParallel(nn.Linear(2, 1))
    model(torch.ones(1, 2)).sum().backward()
    return model


def name_of(model: DistributedDataParallel) -> str:
    return str(channel_of(model).name)


@on_two_ranks
def test_a_communicator_is_destroyed_at_a_common_point_and_never_by_a_finalizer(world: World) -> None:
    events = stand_in()
    models = [wrap()]
    first = name_of(models[0])
    if world.rank == 0:
        models.clear()
        gc.collect()
    models.append(wrap())  # a common point, but rank 1 still uses the first model
    assert events == []
    if world.rank == 1:
        del models[0]
        gc.collect()
    assert events == []
    models.append(wrap())
    assert events == [f"destroyed {first}"]
    second, third = map(name_of, models)
    if world.rank == 0:
        del models[0]
        gc.collect()
    world.close()  # even with live wrappers, and if ranks have released different ones
    assert events[1:] == [f"destroyed {name}" for name in sorted([second, third])]
    models.clear()
    gc.collect()
    assert len(events) == 3


@on_two_ranks
def test_a_dropped_wrapper_leaves_no_communicator(world: World) -> None:
    # A communicator that NCCL never used is closed immediately, which frees its shared memory.
    events = stand_in(is_used=False)
    model = wrap()
    name = name_of(model)
    shut = nccl_communicators.opened[name]
    del model
    gc.collect()
    assert shut.group is None
    wrap()
    assert events == []
    assert name not in nccl_communicators.opened

    # If one rank has unfinished work, all ranks abort the communicator.
    events = stand_in()
    model = wrap()
    name, channel = name_of(model), channel_of(model)
    if world.rank == 0:
        channel.all_reduce(torch.ones(1))  # rank 1 does not take part
    del model, channel
    gc.collect()
    wrap()
    gc.collect()
    assert events == [f"aborted {name}"]

    # If wrappers are created and dropped repeatedly, only the last communicators remain.
    events = stand_in()
    for number in range(6):
        model = wrap()
        if (number + world.rank) % 2 == 0:
            del model
            gc.collect()
    assert len(events) + len(nccl_communicators.opened) == 6


# -- leaving on an error -----------------------------------------------------------------------------------------------


@pytest.mark.ranks(2, backend="paceline")
def test_a_group_with_shared_memory_can_be_aborted(world: World) -> None:
    """As on a GPU host; rank 0 has a pending operation."""
    group: Any = dist.group.WORLD
    if world.rank == 0:
        group.launch_all_reduce(group.allocate(3, torch.float32))
    stand_in()
    with pytest.raises(ValueError, match="a bug"), world:
        raise ValueError("a bug")
    assert not dist.is_initialized()
    assert not group.native


@on_two_ranks
@pytest.mark.parametrize("error", [ValueError("a bug"), SystemExit(1)], ids=["raises", "exits_with_1"])
def test_leaving_the_world_on_an_error_aborts_pending_operations(world: World, error: BaseException) -> None:
    """It waited for the other ranks, so the error appeared only after NCCL's timeout, if at all."""
    events = stand_in()
    model = wrap()
    name = name_of(model)
    if world.rank == 1:
        with pytest.raises(ValueError, match="ended"), world:  # never joins rank 0's operation
            raise ValueError("ended")
        return
    channel_of(model).all_reduce(torch.ones(1))
    with pytest.raises(type(error)), world:
        raise error
    assert events == [f"aborted {name}"]
    assert not dist.is_initialized()


@on_two_ranks
def test_sys_exit_zero_is_not_an_error(world: World) -> None:
    events = stand_in()
    model = wrap()
    with pytest.raises(SystemExit), world:
        raise SystemExit(0)
    assert events == [f"destroyed {name_of(model)}"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "backend", [pytest.param(name, marks=pytest.mark.ranks(2, backend=name)) for name in ("gloo", "paceline")]
)
def test_without_nccl_nothing_is_aborted_on_an_error(world: World, backend: str) -> None:
    model = wrap()
    group: Any = dist.group.WORLD
    if world.rank == 0:
        group.allreduce([torch.ones(1)])  # alone
    with pytest.raises(ValueError, match="a bug"), world:
        raise ValueError("a bug")
    assert not dist.is_initialized()
    assert not get_known_groups()
    del model


# -- one GPU per rank --------------------------------------------------------------------------------------------------


def test_a_rank_uses_the_gpu_of_its_local_rank_or_the_only_one() -> None:
    assert [choose_gpu(12, 0, 1), choose_gpu(12, 7, 8)] == [0, 7]
    assert choose_gpu(12, 3, 1) == 0  # a scheduler shows each task only its own GPU
    with pytest.raises(WorldError, match=r"rank 12: local rank 4 has no GPU, because only 4 are visible"):
        choose_gpu(12, 4, 4)


def test_ranks_that_share_a_single_gpu_are_refused_by_uuid() -> None:
    store = HashStore()
    for rank, gpu in enumerate(["GPU-a", "GPU-b", "GPU-a"]):
        store.set(f"gpu/{rank}", gpu)
    check_own_gpu(store, 1, 3, "GPU-b")
    for rank, other in ((0, 2), (2, 0)):
        with pytest.raises(WorldError, match=rf"rank {rank}: rank {other} has the same GPU GPU-a"):
            check_own_gpu(store, rank, 3, "GPU-a")


def test_mig_slices_of_one_gpu_are_different_gpus() -> None:
    names = {gpu_name("GPU-a", {"CUDA_VISIBLE_DEVICES": visible}) for visible in ("MIG-1", "MIG-2", "0", "1")}
    assert names == {"GPU-a MIG-1", "GPU-a MIG-2", "GPU-a"}
    hosts = {gpu_name("GPU-a", {"NCCL_HOSTID": host}) for host in ("0", "1")}
    assert len(hosts) == 2, "NCCL accepts two ranks on one GPU if it believes that they are on different hosts"


@pytest.mark.parametrize(
    ("backend", "chosen", "bound"),
    [
        (None, "cpu:gloo,cuda:nccl", torch.device("cuda", 0)),
        ("nccl", "nccl", torch.device("cuda", 0)),
        ("paceline", "paceline", None),
    ],
)
def test_init_on_a_gpu_sets_it_and_binds_nccl_to_it(
    monkeypatch: pytest.MonkeyPatch, backend: str | None, chosen: str, bound: torch.device | None
) -> None:
    """Binding creates the world's communicator at init, and wrappers split theirs from it."""
    for name in world_module.REQUIRED:
        monkeypatch.delenv(name, raising=False)
    seen: dict[str, Any] = {}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: seen.update(index=index))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(dist, "is_backend_available", lambda _: True)

    def initialize(name: str, **options: Any) -> None:
        seen.update(options, name=name)
        options.update(device_id=None)
        real("gloo", **options)

    real = dist.init_process_group
    monkeypatch.setattr(dist, "init_process_group", initialize)
    config = chosen if ":" in chosen else f"cpu:{chosen},cuda:{chosen}"
    monkeypatch.setattr(dist, "get_backend_config", lambda: config)
    world = paceline.init(backend)
    try:
        assert (seen["name"], seen["device_id"], seen["index"]) == (chosen, bound, 0)
        assert world.device == torch.device("cuda", 0)
    finally:
        world.close()


GPU = torch.device("cuda", 0)


# -- creating communicators --------------------------------------------------------------------------------------------


class LikeNccl(ProcessGroupGloo):
    """A backend with the parts of NCCL's interface that Paceline uses; it records the calls."""

    class Options:
        def __init__(self) -> None:
            self.split_from, self.split_color = None, None

    supports_splitting = True
    made: ClassVar[list[Any]] = []
    """All instances, kept alive because otherwise only their C++ part survives."""

    def __init__(self, store: Any, rank: int, size: int, options: Any) -> None:
        super().__init__(store, rank, size, timedelta(seconds=20))
        self.asked, self.connected = options, []  # type: ignore[var-annotated]
        self.made.append(self)

    def eager_connect_single_device(self, device: torch.device) -> None:
        self.connected.append(device)


def group_with_nccl(*, bound: torch.device | None) -> Any:
    group: Any = ProcessGroup(HashStore(), 0, 1)
    torch_distributed.attach_nccl(group, group, [0], HashStore(), "parent", timedelta(seconds=20))
    group.bound_device_id = bound
    return group


@pytest.fixture
def like_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(dist, "ProcessGroupNCCL", LikeNccl, raising=False)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)


@pytest.mark.usefixtures("like_nccl")
@pytest.mark.parametrize("bound", [GPU, None])
def test_a_communicator_is_split_from_its_parent_if_that_is_bound_to_a_device(bound: torch.device | None) -> None:
    parent, own = group_with_nccl(bound=bound), ProcessGroup(HashStore(), 0, 1)
    torch_distributed.attach_nccl(own, parent, [0], HashStore(), "own", timedelta(seconds=20))
    backend = torch_distributed.nccl_of(own)
    assert own.group_name == "own"
    assert backend.asked.split_from is (torch_distributed.nccl_of(parent) if bound else None)
    assert backend.connected == ([GPU] if bound else [])
    assert backend.asked._timeout == timedelta(seconds=20)
    assert backend.asked.global_ranks_in_group == [0]


# -- exposed communication time ----------------------------------------------------------------------------------------


class Clock:
    """A fake device stream: an event gets its time when the device reaches it."""

    def __init__(self) -> None:
        self.queued: list[Any] = []
        self.made = 0

    def event(self, **options: Any) -> Any:
        assert options == {"device": GPU, "enable_timing": True}
        self.made += 1
        event = SimpleNamespace(at=None)
        event.record = lambda: (setattr(event, "at", None), self.queued.append(event))
        event.query = lambda: event.at is not None
        event.elapsed_time = lambda end: end.at - event.at
        return event

    def passes(self, *milliseconds: float) -> None:
        for at in milliseconds:
            self.queued.pop(0).at = at


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(torch, "Event", clock.event)
    monkeypatch.setattr(channel, "is_capturing", lambda _: False)
    return clock


def test_exposed_time_is_read_from_events_the_device_has_passed(clock: Clock) -> None:
    time = ExposedTime(GPU)
    for _ in range(2 * SAMPLED):
        with time:
            pass
    assert time.seconds == 0  # the device has reached no event, and the host does not wait for it
    clock.passes(1000, 1250, 3000)
    assert time.seconds == 0.25 * 2 * SAMPLED
    clock.passes(3500)
    assert time.seconds == (0.25 + 0.5) / 2 * 2 * SAMPLED  # two measurements stand for all waits
    for _ in range(SAMPLED):
        with time:
            pass
    assert clock.made == 4  # events are used again


def test_a_host_far_ahead_of_its_device_does_not_pile_up_events(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    time = ExposedTime(GPU)
    waits = (MOST_PENDING + 10) * SAMPLED
    for _ in range(waits):
        with time:
            pass
    assert len(clock.queued) == 2 * MOST_PENDING
    monkeypatch.setattr(channel, "is_capturing", lambda _: True)
    clock.passes(*range(2 * MOST_PENDING))
    with time:
        assert not clock.queued  # a capture records no times
    assert time.seconds == pytest.approx(waits / 1000)


# -- capture in a CUDA graph -------------------------------------------------------------------------------------------


def capture(world: World, case: str) -> str:
    """Train a few steps, then one with torch reporting that a graph is being captured."""
    options: Any = {"check_finite": {"check_finite": True}, "replicas": {"check_replicas_every": 2}}.get(case, {})
    module = nn.Sequential(nn.Embedding(4, 3, sparse=case == "sparse"), nn.Linear(3, 2))
    patches = ExitStack()
    patches.enter_context(patch.object(GraphCapture, "is_active", lambda _: True))
    model = DistributedDataParallel(module, **options)
    if case == "compressor":
        model.register_comm_hook(TopK(model, 0.5), compression.hook)
    x = torch.arange(4)
    try:
        for step in range(1 if case == "first steps" else 4):
            if step == 3 or case == "first steps":
                patches.enter_context(patch.object(extensions, "is_capturing", lambda _: True))
            if case == "weight":
                with model.weight(2):
                    model(x).sum().backward()
            else:
                model(x).sum().backward()
            model.zero_grad()
    except UsageError as error:
        return str(error)
    finally:
        patches.close()
    return ""


@pytest.mark.parametrize(
    ("case", "named"),
    [
        ("plain", None),
        ("check_finite", "check_finite=True"),
        ("replicas", "check_replicas_every"),
        ("weight", "model.weight()"),
        ("sparse", "sparse gradients"),
        ("compressor", "a communication hook or compressor"),
        ("first steps", "the wrapper's first steps"),
    ],
)
def test_cuda_graph_capture_refuses_unsupported_operations_by_name(pools: Pools, case: str, named: str | None) -> None:
    for rank, message in enumerate(pools.run(2, capture, case)):
        if named is None:
            assert message == ""
        else:
            assert message.startswith(f"rank {rank}: a CUDA graph cannot capture {named}")
