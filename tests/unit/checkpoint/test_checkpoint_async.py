"""Background saves capture the state at save(), count only once they are durable, and report every error."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from test_checkpoint_folder import fail_at, names, open_with
from test_checkpoint_ranks import Holder, raised
from torch import nn

from forked import REAL_END
from insides import SIZE, BlackBox, read_box, recorder, step_folders
from paceline import World
from paceline.checkpoint import Checkpointer, CheckpointWarning
from paceline.errors import CheckpointError
from processes import paceline
from twins import Pools


@contextmanager
def held_writer() -> Iterator[threading.Event]:
    """Block the writer before its first file until the event is set or the block ends."""
    go_on, write_file = threading.Event(), step_folders.write_file

    def held(*arguments: Any) -> Any:
        if threading.current_thread() is not threading.main_thread():
            assert go_on.wait(30)
        return write_file(*arguments)

    step_folders.write_file = held
    try:
        yield go_on
    finally:
        go_on.set()
        step_folders.write_file = write_file


def test_latest_and_pruning_only_count_durable_saves(tmp_path: Path) -> None:
    checkpointer, _ = open_with(tmp_path, async_save=True, keep=1)
    checkpointer.save(1)
    checkpointer.wait()
    with held_writer():
        path = checkpointer.save(2)
        latest = checkpointer.latest()
        assert latest is not None
        assert latest.name == "step-00000001"
        assert checkpointer.steps() == [1]
        assert names(tmp_path) == [".writing-step-00000002", "step-00000001"]
    checkpointer.wait()
    assert checkpointer.latest() == path
    assert names(tmp_path) == ["step-00000002"]


def due_save(checkpointer: Checkpointer) -> None:
    checkpointer.due.save(checkpointer, 2)


@pytest.mark.parametrize("call", [Checkpointer.restore, Checkpointer.close, due_save])
def test_waiting_for_a_slow_disk_does_not_count_as_a_hang(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: Callable[[Checkpointer], Any]
) -> None:
    # The launcher blamed the script for the wait and killed rank 0 at every save.
    (tmp_path / "rank-0").write_bytes(bytes(SIZE))
    monkeypatch.setattr(recorder, "box", BlackBox(tmp_path / "rank-0", 0, 1))
    checkpointer, _ = open_with(tmp_path, async_save=True)
    phases: list[str] = []

    def look() -> None:
        snapshot = read_box(tmp_path / "rank-0")
        phases.append("" if snapshot is None else snapshot.phase)
        go_on.set()

    with held_writer() as go_on:
        checkpointer.save(1)
        threading.Timer(0.1, look).start()
        call(checkpointer)
        assert phases == ["checkpoint"]


def test_a_second_save_waits_for_the_first(tmp_path: Path) -> None:
    # Otherwise copies would pile up, or the second save would overwrite the memory that the first is written from.
    checkpointer, model = open_with(tmp_path, async_save=True, fill=1.0)
    with held_writer() as go_on:
        checkpointer.save(1)
        nn.init.constant_(model.weight, 2.0)
        threading.Timer(0.05, go_on.set).start()
        checkpointer.save(2)
        assert "step-00000001" in names(tmp_path)
    checkpointer.restore(1)
    assert model.weight.unique().tolist() == [1.0]
    checkpointer.restore(2)
    assert model.weight.unique().tolist() == [2.0]
    checkpointer.close()
    assert names(tmp_path) == ["step-00000001", "step-00000002"]


def save_onto_a_full_disk(world: World, folder: str, how: str) -> tuple[Any, ...]:
    with warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch:
        warnings.simplefilter("error")
        checkpointer = Checkpointer(folder, async_save=True)
        own = checkpointer.register("own", Holder({"rank": world.rank}), per_rank=True)
        checkpointer.save(1)
        checkpointer.wait()
        if world.is_main:
            fail_at(patch, "fsync", 1)
        checkpointer.save(2)  # no error: training goes on
        failure = raised(getattr(checkpointer, how))
        if how == "close":
            checkpointer = Checkpointer(folder, async_save=True)
            checkpointer.register("own", own, per_rank=True)
        steps = checkpointer.steps()
        checkpointer.save(3)
        step = checkpointer.restore()
        checkpointer.close()
    return failure, steps, step


@pytest.mark.parametrize("how", ["wait", "close"])
def test_a_failed_write_is_reported_on_every_rank_and_later_saves_work(pools: Pools, tmp_path: Path, how: str) -> None:
    found = pools.run(2, save_onto_a_full_disk, str(tmp_path), how)
    for (kind, message), steps, step in found:
        assert kind == "CheckpointError"
        assert "rank 0 could not save step 2 to" in message
        assert "No space left on device" in message
        assert (steps, step) == ([1], 3)


def per_rank_state_at_save(world: World, folder: str) -> float:
    checkpointer = Checkpointer(folder, async_save=True)
    own = checkpointer.register("own", Holder({"residual": torch.full((1000,), world.rank + 1.0)}), per_rank=True)
    with held_writer() as go_on:
        checkpointer.save(1)
        own.state["residual"].fill_(-1.0)
        go_on.set()
        checkpointer.wait()
    checkpointer.restore()
    checkpointer.close()
    return float(own.state["residual"].mean())


def test_save_collects_state_of_other_ranks_before_it_returns(pools: Pools, tmp_path: Path) -> None:
    assert pools.run(2, per_rank_state_at_save, str(tmp_path)) == [1.0, 2.0]


@pytest.mark.parametrize("error", [MemoryError(), SystemExit(3)])
def test_a_dead_writer_is_reported_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    checkpointer, _ = open_with(tmp_path, async_save=True)
    checkpointer.save(1)

    def dies(store: step_folders.Storage, draft: Path, step: int) -> Path:
        raise error

    checkpointer.wait()
    with monkeypatch.context() as patch:
        patch.setattr(step_folders.Storage, "commit", dies)
        checkpointer.save(2)
        with pytest.raises(CheckpointError, match="rank 0 could not save step 2") as caught:
            checkpointer.wait()
    assert caught.value.__cause__ is error
    checkpointer.wait()
    assert names(tmp_path) == ["step-00000001"]
    checkpointer.save(3)
    checkpointer.close()
    assert names(tmp_path) == ["step-00000001", "step-00000003"]


def test_an_exception_in_the_block_is_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The other ranks, which may not have raised, need not take part.
    fail_at(monkeypatch, "fsync", 3)

    def leave_by_exception() -> None:
        with Checkpointer(tmp_path, async_save=True) as checkpointer:
            checkpointer.register("model", nn.Linear(2, 2))
            checkpointer.save(1)
            raise ZeroDivisionError

    with pytest.warns(CheckpointWarning, match="could not save step 1"), pytest.raises(ZeroDivisionError):
        leave_by_exception()


PROGRAM = """
import sys, time, torch
from paceline.checkpoint import Checkpointer
from paceline.checkpoint import step_folders
write_file = step_folders.write_file
checkpointer = Checkpointer(sys.argv[1], async_save=True)
checkpointer.register("model", torch.nn.Linear(1000, 1))
checkpointer.save(1)
checkpointer.wait()
def slow(path, content):
    time.sleep(0.2)
    if path.name == "state.json":
        raise OSError(28, "No space left on device")
    return write_file(path, content)
step_folders.write_file = slow
checkpointer.save(2)
print("saved", flush=True)
"""


@pytest.mark.slow
def test_process_exit_waits_for_the_write_and_reports_its_failure(tmp_path: Path) -> None:
    points = tmp_path / "points"
    result = paceline(tmp_path, str(points), program=("-c", PROGRAM), fork="all", **{REAL_END: "1"})
    assert (result.returncode, result.stdout, names(points)) == (0, "saved\n", ["step-00000001"]), result.stderr
    assert "could not save step 2" in result.stderr
