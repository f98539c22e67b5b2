"""The checkpoint folder serves one run at a time and holds only complete checkpoints, whatever fails along the way."""

from __future__ import annotations

import errno
import io
import os
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from forked import Forked, call
from insides import step_name
from paceline.checkpoint import Checkpointer, load_weights
from paceline.errors import CheckpointError, CheckpointWarning, UsageError
from processes import run_here, until


def names(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


def open_with(folder: Path, fill: float = 0.0, size: int = 1000, **options: Any) -> tuple[Checkpointer, nn.Module]:
    checkpointer = Checkpointer(folder, **options)
    model = checkpointer.register("model", nn.Linear(size, 1))
    nn.init.constant_(model.weight, fill)
    return checkpointer, model


def test_a_save_never_prunes_itself_or_later_steps(tmp_path: Path) -> None:
    checkpointer, _ = open_with(tmp_path, keep=1)
    checkpointer.save(20)
    with pytest.warns(CheckpointWarning, match=r"step 10 was saved .*, which has the later step 20 of another run"):
        checkpointer.save(10)
    checkpointer.save(11)  # one warning is enough
    assert checkpointer.steps() == [11, 20]
    checkpointer.save(30)
    assert checkpointer.steps() == [30]


def test_a_folder_that_cannot_be_written_to_is_refused_with_the_reason() -> None:
    with pytest.raises(UsageError, match="/proc/self/task"):
        Checkpointer("/proc/self/task")


def test_other_files_in_the_folder_are_left_alone(tmp_path: Path) -> None:
    # metrics.jsonl in the checkpoint folder, or the .DS_Store of a file manager, made every resume refuse.
    mine = [tmp_path / name for name in (".DS_Store", "step-1", "step-2x/inside", ".writing-notes/inside")]
    for path in mine:
        path.parent.mkdir(exist_ok=True)
        path.write_text("mine")
    before = names(tmp_path)
    checkpointer, _ = open_with(tmp_path, keep=1)
    for step in (1, 2):
        checkpointer.save(step)
    checkpointer.close()
    checkpointer, _ = open_with(tmp_path)
    assert checkpointer.restore() == 2
    assert [path.read_text() for path in mine] == ["mine"] * len(mine)
    assert names(tmp_path) == sorted([*before, "step-00000002"])


def test_linked_checkpoints_are_read_and_never_modified(tmp_path: Path) -> None:
    # Steps moved to another disk and linked back were ignored, so a run restarted at step 0.
    run, archive = tmp_path / "run", tmp_path / "archive"
    with open_with(run, fill=1.0)[0] as checkpointer:
        for step in (1, 2):
            moved = checkpointer.save(step).rename(tmp_path / f"old-{step}")
            (run / step_name(step)).symlink_to(moved)
    (tmp_path / "link").symlink_to(run)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.glob("old-*/*")}
    with open_with(tmp_path / "link", keep=1)[0] as checkpointer:
        assert checkpointer.steps() == [1, 2]
        assert checkpointer.restore() == 2
        assert len(load_weights(run / step_name(1))) == 2
        checkpointer.save(2)
    assert names(run) == ["step-00000002"]
    assert not (run / "step-00000002").is_symlink()
    assert {path: path.stat().st_mtime_ns for path in tmp_path.glob("old-*/*")} == before
    for step, target in ((8, "x" * 300), (9, archive)):  # the error for 8 is not a missing target
        (run / step_name(step)).symlink_to(target)
    checkpointer, _ = open_with(run, keep=1)
    with pytest.warns(CheckpointWarning) as warned:
        assert (checkpointer.restore(), len(load_weights(run))) == (2, 2)
    messages = [str(warning.message) for warning in warned]
    for message, target in zip(messages, [archive, "x" * 300] * 2, strict=True):
        assert f"is damaged and skipped: it is a link to {target}, which cannot be opened" in message
    checkpointer.save(10)
    # Their targets may be protected checkpoints that are only temporarily unavailable.
    assert names(run) == ["step-00000008", "step-00000009", "step-00000010"]


def test_undeletable_leftovers_do_not_block_saves_or_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A reader on NFS, a mount or another owner made every later save fail, as well as the next start.
    rmtree = shutil.rmtree

    def refuse_busy(path: Path, **options: Any) -> None:
        if (path / "busy").exists():
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))
        rmtree(path, **options)

    monkeypatch.setattr(shutil, "rmtree", refuse_busy)
    checkpointer, _ = open_with(tmp_path, keep=1)
    (checkpointer.save(1) / "busy").touch()
    with pytest.warns(CheckpointWarning, match=r"/.deleted-step-00000001 cannot be deleted: Device or resource busy"):
        checkpointer.save(2)
    checkpointer.save(3)  # does not warn again
    checkpointer.close()
    for left in (".writing-step-00000004", ".replaced-step-00000003", "step-00000001"):
        (tmp_path / left).mkdir()
        (tmp_path / left / "busy").touch()
    with pytest.warns(CheckpointWarning) as warned:
        checkpointer, _ = open_with(tmp_path, keep=1)
    assert len(warned) == 3
    with pytest.warns(CheckpointWarning, match=r"-00000001\.1 cannot be deleted"):
        checkpointer.save(4)
    checkpointer.save(4)
    left = [".deleted-step-00000001", ".deleted-step-00000001.1", ".deleted-step-00000003", ".deleted-step-00000004"]
    assert names(tmp_path) == [*left, "step-00000004"]
    monkeypatch.undo()
    checkpointer.save(5)
    assert names(tmp_path) == ["step-00000005"]


def test_a_file_system_that_cannot_sync_folders_is_named_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fsync = os.fsync

    def refuse_folders(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", refuse_folders)
    with pytest.warns(CheckpointWarning, match=f"the file system of {tmp_path} cannot sync folders"):
        checkpointer, _ = open_with(tmp_path)
    checkpointer.save(1)
    assert checkpointer.restore() == 1


def test_a_folder_name_that_is_not_utf_8_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Its checkpoints were reported as damaged, because safetensors cannot open such a path.
    folder = tmp_path / os.fsdecode(b"run-\xff")
    with open_with(folder, fill=1.0)[0] as checkpointer:
        checkpointer.save(1)
        assert checkpointer.restore() == 1
    assert len(load_weights(folder)) == 2
    stdout = io.TextIOWrapper(io.BytesIO(), "utf-8")
    monkeypatch.setattr(sys, "stdout", stdout)
    assert run_here(monkeypatch, "checkpoint", "export", str(folder), "--out", str(folder / "model.pt")) == 0
    stdout.seek(0)
    assert stdout.read().startswith(f"{tmp_path}/run-\\udcff/model.pt: 'model' of step 1")


@pytest.fixture(params=[0o000, 0o277])
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def test_only_the_owner_can_read_checkpoints_whatever_the_umask(tmp_path: Path, umask: int) -> None:
    # They were 0644 in 0755 folders, so every user of the host could read the weights.
    checkpointer, _ = open_with(tmp_path / "new")
    path = checkpointer.save(1)
    modes = {each.name: each.stat().st_mode & 0o777 for each in (tmp_path / "new", path, *path.iterdir())}
    expected = {name: (0o700 if name in ("new", "step-00000001") else 0o600) & ~umask for name in modes}
    assert modes == expected
    assert len(modes) == 6


def refusal_to_open(folder: Path) -> str:
    try:
        Checkpointer(folder).close()
    except UsageError as error:
        return str(error)
    return ""


def test_a_second_run_on_the_folder_is_refused(tmp_path: Path) -> None:
    with Checkpointer(tmp_path) as checkpointer:
        with pytest.raises(UsageError, match=f"another run is using the checkpoint folder {tmp_path} "):
            Checkpointer(tmp_path)
        assert "another run is using" in call(refusal_to_open, tmp_path)
        checkpointer.save(1)
    Checkpointer(tmp_path).close()
    assert names(tmp_path) == ["step-00000001"]


checkpointers: list[Checkpointer] = []


def leave_a_worker(folder: Path) -> int:
    """Open the folder, fork a worker that outlives this process, and exit without closing the folder."""
    checkpointers.append(Checkpointer(folder))
    if (worker := os.fork()) == 0:
        time.sleep(60)
        os._exit(0)
    return worker


def test_a_forked_worker_that_outlives_the_run_does_not_hold_the_lock(tmp_path: Path) -> None:
    worker = call(leave_a_worker, tmp_path)
    try:
        os.kill(worker, 0)
        until(lambda: not refusal_to_open(tmp_path))  # the worker may not have closed its descriptor yet
    finally:
        os.kill(worker, signal.SIGKILL)


def test_a_save_killed_between_its_two_renames_loses_nothing(tmp_path: Path) -> None:
    checkpointer, model = open_with(tmp_path, fill=1.0)
    checkpointer.save(1).rename(tmp_path / ".replaced-step-00000001")
    checkpointer.close()
    checkpointer, model = open_with(tmp_path)
    assert checkpointer.restore() == 1
    assert model.weight.mean().item() == 1.0


def test_kill_9_during_a_save_leaves_earlier_checkpoints_intact(tmp_path: Path) -> None:
    script = f"""
import torch
from paceline.checkpoint import Checkpointer
checkpointer = Checkpointer({str(tmp_path / "points")!r}, keep=1)
model = checkpointer.register("model", torch.nn.Linear(500_000, 1))
step = 0
while True:
    step += 1
    torch.nn.init.constant_(model.weight, step)
    checkpointer.save(step)
    print(step, flush=True)
"""
    out = tmp_path / "out"
    process = Forked(["-c", script], tmp_path, os.environ, out, tmp_path / "err")
    until(lambda: out.exists() and bool(out.read_text()))
    process.kill()
    process.wait(60)
    done = len(out.read_text().split())
    checkpointer, model = open_with(tmp_path / "points", size=500_000)
    step = checkpointer.restore()
    assert step >= done
    assert model.weight.min().item() == model.weight.max().item() == step


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 256 KiB."""
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "none", str(tmp_path)], capture_output=True)
    if mounted.returncode != 0:
        pytest.skip("mounting a file system needs root")
    yield tmp_path
    subprocess.run(["umount", "-l", str(tmp_path)], check=True)


def test_a_full_disk_is_reported_and_loses_nothing(small_disk: Path) -> None:
    # The save used to fill the disk before failing, which briefly blocked other users of the disk.
    checkpointer, model = open_with(small_disk, fill=1.0, keep=1, size=35_000)
    checkpointer.save(1)
    before = os.stat(small_disk).st_mtime_ns
    figures = r"No space left on device: 2\d\d KiB are needed, but only \d+(\.\d)? KiB are free; earlier checkpoints"
    for step in (2, 1, 2):
        with pytest.raises(CheckpointError, match=rf"step {step} .*{figures}"):
            checkpointer.save(step)
    assert names(small_disk) == ["step-00000001"]
    assert os.stat(small_disk).st_mtime_ns == before  # no entry was created, even temporarily
    nn.init.constant_(model.weight, 2.0)
    assert checkpointer.restore() == 1
    assert model.weight.mean().item() == 1.0
    checkpointer.close()


def test_space_taken_by_a_killed_save_counts_as_free(small_disk: Path) -> None:
    checkpointer, _ = open_with(small_disk, size=35_000)
    leftover = small_disk / ".writing-step-00000009"
    leftover.mkdir()
    (leftover / "model.safetensors").write_bytes(bytes(150_000))
    checkpointer.save(1)
    assert names(small_disk) == ["step-00000001"]
    checkpointer.close()


def fail_at(monkeypatch: pytest.MonkeyPatch, function: str, call: int) -> None:
    """Make the `call`-th call of ``os.<function>`` or ``Path.<function>`` fail as if the disk were full."""
    owner: Any = os if hasattr(os, function) and function == "fsync" else Path
    original, calls = getattr(owner, function), [0]

    def failing(*arguments: Any) -> Any:
        calls[0] += 1
        if calls[0] == call:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return original(*arguments)

    monkeypatch.setattr(owner, function, failing)


@pytest.mark.parametrize(
    ("function", "call", "step"),
    # For a new step the second rename belongs to pruning, whose failure does not fail the save.
    [("fsync", 1, 2), ("fsync", 4, 1), ("fsync", 6, 2), ("rename", 1, 2), ("rename", 1, 1), ("rename", 2, 1)],
)
def test_a_failed_fsync_or_rename_is_reported_and_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str, call: int, step: int
) -> None:
    checkpointer, model = open_with(tmp_path, fill=1.0, keep=1)
    checkpointer.save(1)
    with monkeypatch.context() as patch:
        fail_at(patch, function, call)
        with pytest.raises(CheckpointError, match="No space left on device"):
            checkpointer.save(step)
    assert names(tmp_path) == ["step-00000001"]
    nn.init.constant_(model.weight, 2.0)
    assert checkpointer.restore() == 1
    assert model.weight.mean().item() == 1.0
    checkpointer.save(3)
    assert names(tmp_path) == ["step-00000003"]


def test_files_and_folders_are_synced_before_pruning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpointer, _ = open_with(tmp_path, keep=1)
    checkpointer.save(1)
    events: list[str] = []
    fsync, rename = os.fsync, Path.rename

    def record_fsync(descriptor: int) -> None:
        events.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        fsync(descriptor)

    def record_rename(self: Path, target: Path) -> Path:
        events.append(f"{self.name} -> {target.name}")
        return rename(self, target)

    monkeypatch.setattr(os, "fsync", record_fsync)
    monkeypatch.setattr(Path, "rename", record_rename)
    checkpointer.save(2)
    assert events == [
        "model.safetensors",
        "rank-00000.safetensors",
        "state.json",
        "manifest.json",
        ".writing-step-00000002",
        ".writing-step-00000002 -> step-00000002",
        tmp_path.name,
        "step-00000001 -> .deleted-step-00000001",
    ]


def test_saving_continues_after_the_folder_is_recreated(tmp_path: Path) -> None:
    checkpointer, _ = open_with(tmp_path / "runs")
    checkpointer.save(1)
    shutil.rmtree(tmp_path / "runs")
    with pytest.raises(CheckpointError, match=r"step 2 to .* No such file"):
        checkpointer.save(2)
    (tmp_path / "runs").mkdir()
    checkpointer.save(3)
    assert names(tmp_path / "runs") == ["step-00000003"]
    with pytest.raises(UsageError, match="another run is using"):
        Checkpointer(tmp_path / "runs")
