"""A wrapper's NCCL communicator, its exposed time, and refusals during graph capture, with fakes instead of a GPU."""

from __future__ import annotations

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

from paceline import compression
from paceline.compression import TopK
from paceline.core import torch_distributed
from paceline.core.world import World
from paceline.ddp import DistributedDataParallel, channel, extensions
from paceline.ddp.channel import MOST_PENDING, ExposedTime
from paceline.ddp.extensions import GraphCapture
from paceline.errors import UsageError
from twins import Pools

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

    def event(self, **options: Any) -> Any:
        assert options == {"device": GPU, "enable_timing": True}
        event = SimpleNamespace(at=None)
        event.record = lambda: self.queued.append(event)
        event.query = lambda: event.at is not None
        event.elapsed_time = lambda end: end.at - event.at
        return event

    def passes(self, *milliseconds: float) -> None:
        for at in milliseconds:
            self.queued.pop(0).at = at


def test_exposed_time_is_read_from_events_the_device_has_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(torch, "Event", clock.event)
    monkeypatch.setattr(channel, "is_capturing", lambda _: False)
    time = ExposedTime(GPU)
    for _ in range(2):
        with time:
            pass
    assert time.seconds == 0  # the device has reached no event, and the host does not wait for it
    clock.passes(1000, 1250, 3000)
    assert time.seconds == 0.25
    clock.passes(3500)
    assert time.seconds == 0.75


def test_a_host_far_ahead_of_its_device_does_not_pile_up_events(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(torch, "Event", clock.event)
    monkeypatch.setattr(channel, "is_capturing", lambda _: False)
    time = ExposedTime(GPU)
    for _ in range(MOST_PENDING + 10):
        with time:
            pass
    assert len(clock.queued) == 2 * MOST_PENDING
    monkeypatch.setattr(channel, "is_capturing", lambda _: True)
    clock.passes(*range(2 * MOST_PENDING))
    with time:
        assert not clock.queued  # a capture records no times
    assert time.seconds == pytest.approx(MOST_PENDING / 1000)


# -- capture in a CUDA graph -------------------------------------------------------------------------------------------


def capture(world: World, case: str) -> str:
    """Train a few steps, then one with torch reporting that a graph is being captured."""
    options: dict[str, Any] = {
        "check_finite": {"check_finite": True},
        "replicas": {"check_replicas_every": 2},
    }.get(case, {})
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
