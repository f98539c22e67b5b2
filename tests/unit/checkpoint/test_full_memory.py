"""Full memory and full disks: losses are reported, training continues, and a job without any save fails."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from loops import loop
from paceline.checkpoint import Checkpointer
from paceline.core.job_directory import PARENT
from paceline.errors import CheckpointError, CheckpointWarning
from processes import paceline, script

LOOP = loop(
    15,
    'paceline.Checkpointer(given["folder"], every=5)',
    begin="given = json.loads(sys.argv[1])",
    before="""
if world.is_main and step == first_step:
    print("begins at", step, checkpointer.history.steps_redone, checkpointer.history.rescued_from, flush=True)
if world.is_main and step == 4 and start == 0 and "fill" in given:
    with open(given["fill"] + "/fill", "wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            pass
if world.rank == 1 and step == given.get("kill") and start == 0:
    os.kill(os.getpid(), signal.SIGKILL)
""",
    end='if given.get("close", True): checkpointer.close()',
)


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A file system of 2 MiB with 64 KiB free."""
    (place := tmp_path / "small").mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "none", str(place)], capture_output=True)
    if mounted.returncode != 0:
        pytest.skip("mounting a file system needs root")
    (place / "ballast").write_bytes(bytes(2**21 - 2**16))
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def train(where: Path, environment: dict[str, str], **given: Any) -> tuple[int, list[str], str]:
    """Run the loop on two ranks; return the exit code, stdout lines and stderr."""
    text = json.dumps({"folder": str(where / "checkpoints")} | given)
    done = paceline(where, "run", "--nproc", "2", script(where, LOOP), text, fork="all", **environment)
    return done.returncode, done.stdout.splitlines(), done.stderr


def test_a_job_with_too_little_memory_restarts_from_disk_with_a_warning(tmp_path: Path, small: Path) -> None:
    # One rank without room for its copies disabled all restarts.
    code, out, err = train(tmp_path, {PARENT: str(small)}, kill=7)
    assert (code, out) == (0, ["begins at 0 0 None", "begins at 5 2 disk"]), err
    assert "ranks 0, 1: a failure will cost the steps since the last save on disk" in err
    assert f"because the job's folder is full ({small}" in err
    assert "; enlarge it (in a container: docker run --shm-size=8g), or choose another folder with PACELINE_JOBS" in err
    assert "from step 5, which is on disk, 2 steps back, because no rank could save step 7 (restart 1)" in err
    assert [path.name for path in small.iterdir()] == ["ballast"]


def test_a_full_user_chosen_folder_does_not_disable_restarts(tmp_path: Path, small: Path) -> None:
    with (small / "ballast").open("ab") as ballast:
        ballast.write(bytes(2**16))
    code, out, err = train(tmp_path, {PARENT: str(small)}, kill=7)
    assert (code, out) == (0, ["begins at 0 0 None", "begins at 7 0 memory"]), err
    assert f" ({small}: No space left on device)" in err
    assert [path.name for path in small.iterdir()] == ["ballast"]


@pytest.mark.slow
def test_memory_that_fills_up_during_training_saves_the_last_step_to_disk(tmp_path: Path, small: Path) -> None:
    # The message claimed that no rank could save the step.
    (small / "ballast").unlink()
    code, out, err = train(tmp_path, {PARENT: str(small)}, kill=7, fill=str(small))
    assert (code, out) == (0, ["begins at 0 0 None", "begins at 7 0 disk"]), err
    assert "starting all ranks again from step 7, which is on disk (restart 1)" in err
    assert [path.name for path in small.iterdir()] == ["fill"]


@pytest.mark.slow
def test_training_continues_on_a_full_disk_but_ending_unsaved_is_a_failure(tmp_path: Path, small: Path) -> None:
    # Every failed save restarted all ranks, and the job exited with code 0 and an empty folder.
    code, out, err = train(tmp_path, {}, close=False, folder=str(small))
    assert (code, out) == (1, ["begins at 0 0 None"]), err
    assert "error: the job ended, but no step is saved in " in err
    assert err.count("CheckpointWarning: ") == 1, "once for each cause"
    assert "step-00000005: No space left on device: " in err
    assert "KiB are needed, " in err
    assert "training continues, and the next save tries again" in err
    assert not list(small.glob("step-*"))


def full(_: int) -> None:
    """Raise the error of a full disk."""
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("async_save", [False, True], ids=["", "async"])
def test_a_failed_scheduled_save_warns_once_and_is_retried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, async_save: bool
) -> None:
    checkpointer = Checkpointer(tmp_path, every=1, async_save=async_save)
    checkpointer.register("model", nn.Linear(2, 2))
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            for _ in range(4):
                checkpointer.step()
            checkpointer.due.finish(checkpointer)
    [warning] = warned
    assert "training continues, and the next save tries again" in str(warning.message)
    assert checkpointer.due.failed == [1, 2, 3, 4]
    checkpointer.step()
    checkpointer.close()
    assert [path.name for path in tmp_path.glob("step-*")] == ["step-00000005"]


def test_closing_without_any_save_raises_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpointer = Checkpointer(tmp_path, every=1)
    checkpointer.register("model", nn.Linear(2, 2))
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.warns(CheckpointWarning):
            checkpointer.step()
    with pytest.raises(CheckpointError, match="all 1 saves to"):
        checkpointer.close()
    checkpointer.close()
    Checkpointer(tmp_path).close()  # the folder was released


LOSES_ITS_FOLDER = loop(
    9,
    'paceline.Checkpointer("parent/saved", every=2)',
    before="""
if world.is_main and step == first_step:
    print("begins at", step, checkpointer.history.rescued_from, flush=True)
if step == 3 and start == 0 and world.rank == 1:
    shutil.rmtree("parent")
    open("parent", "w").close()
    os.kill(os.getpid(), signal.SIGKILL)
if step == 6 and start == 1 and world.rank == 0:
    if os.geteuid() == 0:  # mounting a file system needs root
        os.unlink("parent")
        os.mkdir("parent")
        subprocess.run("mount --bind parent parent && mount -o remount,ro,bind parent", shell=True, check=True)
    os.kill(os.getpid(), signal.SIGKILL)
if step == 7 and start == 2 and world.rank == 0:
    if os.geteuid() == 0:
        subprocess.run("umount -l parent", shell=True, check=True)
    else:
        os.unlink("parent")
""",
)


def test_a_job_survives_a_temporarily_unusable_folder(
    tmp_path: Path,
) -> None:
    # The restart failed with a usage error although the step was in memory. First the folder's parent is missing,
    # then the folder is read-only.
    name = script(tmp_path, LOSES_ITS_FOLDER)
    try:
        done = paceline(tmp_path, "run", "--nproc", "2", name, fork="all")
    finally:
        subprocess.run(["umount", "-l", str(tmp_path / "parent")], capture_output=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["begins at 0 None", "begins at 3 memory", "begins at 6 memory"]
    assert "cannot be written to: Not a directory" in done.stderr
    assert os.geteuid() != 0 or "cannot be written to: Read-only file system" in done.stderr
    assert (tmp_path / "parent" / "saved" / "step-00000008").is_dir()
