"""State kept in memory at a step boundary is restored in full or not at all."""

from __future__ import annotations

import errno
import multiprocessing
import os
import struct
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from test_checkpoint_roundtrip import Holder
from torch import nn

from insides import Registered, StepRecord, captures, rank_states, record_path, step_boundary
from paceline.errors import CheckpointError, CommunicationError


def entry(name: str, object: Any, per_rank: bool = False) -> Registered:
    return Registered.of(name, object, per_rank, {})


# -- per-rank state ----------------------------------------------------------------------------------------------------


def test_objects_and_buffers_of_any_size_are_restored(tmp_path: Path) -> None:
    large, empty = torch.arange(100_000.0), torch.zeros(0, 3)
    states = {"residual": large, "none": empty, "flags": torch.tensor([True, False]), "phase": torch.tensor([1 + 2j])}
    own = captures.own([entry("hook", Holder(states), per_rank=True)])
    buffers = [torch.tensor(5), torch.randn(3, 4).bfloat16()]
    files = rank_states.OwnStatesFiles(tmp_path / "states")
    files.write(1, [], [])
    files.write(2, [own], buffers)  # larger than the existing file
    found = rank_states.read_own_states(tmp_path / "states", 2)
    assert all(torch.equal(one, other) for one, other in zip(rank_states.buffers_in(found), buffers, strict=True))
    objects = rank_states.objects_in(found)
    assert objects.nodes == own.nodes
    assert torch.equal(objects.tensors["hook.residual"], large)
    assert objects.tensors["hook.none"].shape == (0, 3)


def test_the_previous_step_survives_a_kill_at_any_point(tmp_path: Path) -> None:
    files = rank_states.OwnStatesFiles(tmp_path / "states")
    for step in (4, 5, 5, 6, 6):  # each is prepared, then completed
        files.write(step, [], [torch.tensor(step)])
    assert rank_states.read_own_states(tmp_path / "states", 4) == {}
    for step in (5, 6):
        assert rank_states.buffers_in(rank_states.read_own_states(tmp_path / "states", step)) == [step]


def test_an_interrupted_write_is_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = rank_states.OwnStatesFiles(tmp_path / "states")
    for step in (1, 2, 3, 4):
        files.write(step, [], [])
    monkeypatch.setattr(struct, "pack_into", lambda *_: None)  # the rank is killed before its last write
    files.write(5, [], [])  # overwrites step 1
    assert [step for step in range(1, 6) if rank_states.read_own_states(tmp_path / "states", step)] == [2, 3, 4]


def test_a_failed_allocation_releases_its_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    room = iter(range(2))

    def allocate(descriptor: int, _: int, size: int) -> None:
        if next(room, None) is None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.ftruncate(descriptor, size)

    monkeypatch.setattr(os, "posix_fallocate", allocate)
    with pytest.raises(OSError, match="No space left"):
        rank_states.OwnStatesFiles(tmp_path / "states")
    assert not list(tmp_path.iterdir())


# -- frozen ------------------------------------------------------------------------------------------------------------


def test_values_that_change_in_place_are_copied() -> None:
    state: Any = {"list": [1, {"deep": torch.zeros(2)}], "ordered": OrderedDict(a=1), "tuple": (torch.ones(1),)}
    frozen = step_boundary.snapshot(state)
    state["list"][1]["deep"] += 1
    state["ordered"]["a"] = 2
    thawed = step_boundary.from_snapshot(frozen, "x")
    assert thawed["list"][1]["deep"].tolist() == [0, 0]
    assert thawed["ordered"] == OrderedDict(a=1)
    assert type(thawed["tuple"]) is tuple


# -- the barrier -------------------------------------------------------------------------------------------------------


def test_a_buffer_with_nine_dimensions_is_kept() -> None:
    module = nn.Module()
    module.register_buffer("deep", torch.ones((1,) * 9))
    module.register_buffer("nothing", None)
    buffers = step_boundary.SmallBuffers([Registered.of("model", module, False, {})])
    buffers.load(buffers.current())
    assert module.deep.shape == (1,) * 9
    assert module.nothing is None


def test_ranks_leave_the_barrier_together_with_the_same_requests(tmp_path: Path) -> None:
    barriers = [rank_states.StepBarrier(tmp_path, rank, 3, 30) for rank in range(3)]
    requests: dict[int, list[int]] = {rank: [] for rank in range(3)}

    def come(rank: int) -> None:
        for step in range(1, 30):
            requests[rank].append(barriers[rank].prepare(step, [], [], requests=4 * (rank == 1 and step == 20)))
            assert min(StepRecord(record_path(tmp_path, other)).prepared for other in range(3)) >= step
            barriers[rank].complete(step, [], [])

    with ThreadPoolExecutor(3) as ranks:
        list(ranks.map(come, range(3), timeout=60))
    assert requests[0] == requests[1] == requests[2] == [4 * (step == 20) for step in range(1, 30)]


def test_a_rank_that_misses_the_barrier_is_named(tmp_path: Path) -> None:
    barrier = rank_states.StepBarrier(tmp_path, 0, 2, 0.2)
    with pytest.raises(CommunicationError, match=r"rank 0: rank 1 did not reach optimizer step 3 within 0\.2 s"):
        barrier.prepare(3, [], [])


def test_an_exited_rank_is_named_immediately(tmp_path: Path) -> None:
    ended = multiprocessing.get_context("fork").Process(
        target=lambda: rank_states.StepBarrier(tmp_path, 1, 2, 60) and None
    )
    ended.start()
    ended.join()
    with pytest.raises(CommunicationError, match="rank 0: rank 1 ended before optimizer step 1") as caught:
        rank_states.StepBarrier(tmp_path, 0, 2, 60).prepare(1, [], [])
    assert caught.value.blamed == (1,)


# -- the boundary ------------------------------------------------------------------------------------------------------


def boundary_of_one_rank(tmp_path: Path) -> tuple[step_boundary.Boundary, torch.optim.Optimizer, nn.Parameter]:
    weight = nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    entries = [entry("optimizer", optimizer)]
    boundary = step_boundary.Boundary(lambda: entries, rank_states.StepBarrier(tmp_path, 0, 1, 30))
    boundary.watch(entries[0])
    return boundary, optimizer, weight


def step(optimizer: torch.optim.Optimizer, weight: nn.Parameter) -> None:
    weight.grad = torch.ones(2)
    optimizer.step()


def test_training_continues_when_state_outgrows_the_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    boundary, optimizer, weight = boundary_of_one_rank(tmp_path)
    assert boundary.barrier is not None
    record = boundary.barrier.record
    boundary.mark()
    step(optimizer, weight)
    monkeypatch.setattr(rank_states.OwnStatesFiles, "write", full)
    assert boundary.mark()
    assert (boundary.step, boundary.can_be_saved, boundary.barrier) == (1, False, None)
    assert "rank 0: a failure will cost the steps since the last save on disk" in caplog.text
    assert record.completed == 0, "state at the end of the step was not stored"
    step(optimizer, weight)
    assert boundary.mark()
    assert (record.completed, record.is_alone) == (2, True)


def test_an_iteration_without_an_optimizer_step_belongs_to_the_next_step(tmp_path: Path) -> None:
    boundary, optimizer, weight = boundary_of_one_rank(tmp_path)
    assert not boundary.mark()  # before the first step
    assert (boundary.step, boundary.can_be_saved) == (0, True)
    assert not boundary.mark()
    step(optimizer, weight)
    assert not boundary.can_be_saved  # the parameters already belong to the next step
    assert boundary.mark()
    assert (boundary.step, boundary.can_be_saved) == (1, True)
    assert not boundary.mark()
    assert boundary.step == 1


def test_parameters_changed_outside_an_optimizer_are_not_restorable(tmp_path: Path) -> None:
    boundary, optimizer, weight = boundary_of_one_rank(tmp_path)
    step(optimizer, weight)
    boundary.mark()
    assert [each.name for each in boundary.states()] == ["optimizer"]
    with torch.no_grad():
        weight += 1
    with pytest.raises(CheckpointError, match="a parameter has changed since the end of the last step"):
        list(boundary.states())


def test_per_rank_state_is_stored_before_and_after_the_optimizer_step(tmp_path: Path) -> None:
    boundary, optimizer, weight = boundary_of_one_rank(tmp_path)
    boundary.mark()
    torch.manual_seed(1)
    step(optimizer, weight)
    prepared = rank_states.read_own_states(rank_states.states_path(tmp_path, 0), 1)
    torch.rand(1)
    boundary.mark()
    completed = rank_states.read_own_states(rank_states.states_path(tmp_path, 0), 1)
    assert prepared["random generator", "torch"] != completed["random generator", "torch"]
    assert rank_states.read_own_states(rank_states.states_path(tmp_path, 0), 1, prepared=True) == prepared
    assert StepRecord(record_path(tmp_path, 0)).completed == 1
