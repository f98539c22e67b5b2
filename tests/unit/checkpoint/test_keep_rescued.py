"""A step in memory when the job has failed for good: a path is printed only if the step was saved there."""

from __future__ import annotations

import os
import re
import shutil
from functools import partial
from pathlib import Path

import pytest
from torch import nn

from loops import loop
from paceline.checkpoint import Checkpointer
from paceline.checkpoint.persist_rescued import keep
from paceline.checkpoint.recovery import DESTINATION
from paceline.checkpoint.step_names import step_name
from paceline.core.step_progress import RESCUE
from paceline.launch.restart_policy import Restarts
from processes import paceline, script, strike

TRAINER = """
import sys, torch, paceline
from paceline.data import DataLoader
from paceline.train import TrainConfig, Trainer
world = paceline.init()
folder = sys.argv[1] if sys.argv[1:] else None
model = paceline.DistributedDataParallel(torch.nn.Linear(4, 2))
def loss(model, batch):
    if trainer.result.steps == 2 and world.rank == 1:
        raise ValueError("broken")
    return model(batch[0]).sum(), len(batch[0])
data = torch.utils.data.TensorDataset(torch.ones(64, 4))
config = TrainConfig(epochs=1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
checkpointer = paceline.Checkpointer(folder) if folder else None
trainer = Trainer(model, optimizer, loss, DataLoader(data, batch_size=4), config, checkpointer=checkpointer)
trainer.fit()
"""
LOOP = loop(3, 'paceline.Checkpointer("runs", every=2)')
LOST = (
    "the last completed step, 2, is lost because the training has no checkpoint folder; give it one: "
    "Checkpointer(folder), or --checkpoint-dir of a recipe"
)


@pytest.mark.slow
@pytest.mark.parametrize("folder", [(), ("runs",)], ids=["without a folder", "with one"])
def test_a_step_in_memory_is_kept_in_the_run_folder_or_reported_lost(tmp_path: Path, folder: tuple[str, ...]) -> None:
    # It was reported as saved in the job's folder, which is deleted with the job.
    done = paceline(tmp_path, "run", "--nproc", "2", script(tmp_path, TRAINER), *folder, fork="all")
    assert done.returncode == 1, done.stderr
    assert "starting all ranks again from step 2, which is in memory" in done.stderr
    assert (LOST in done.stderr.splitlines()) is not bool(folder)
    paths = re.findall(r"/\S*step-\d{8}", done.stderr)
    assert paths == ([str(tmp_path / "runs" / step_name(2))] if folder else [])
    assert all(Path(path).is_dir() for path in paths)


def test_a_save_interrupted_by_a_kill_is_repeated_after_the_restart(tmp_path: Path) -> None:
    # The restarted job never wrote the step that it had in memory; it exited with code 0 and an empty folder.
    first = partial(strike, "before-rename rank=0 at=1")
    done = paceline(tmp_path, "run", "--nproc", "2", script(tmp_path, LOOP), fork="all", first=first)
    assert done.returncode == 0, done.stderr
    assert "starting all ranks again from step 2, which is in memory" in done.stderr
    assert (tmp_path / "runs" / step_name(2) / "manifest.json").exists()


@pytest.fixture
def rescued(tmp_path: Path) -> Path:
    """A rescued step whose checkpoint folder cannot be created."""
    with Checkpointer(tmp_path / "made") as checkpointer:
        checkpointer.register("model", nn.Linear(2, 2))
        made = checkpointer.save(7)
    folder = tmp_path / "job" / RESCUE / "key"
    folder.mkdir(parents=True)
    shutil.copytree(made, folder / step_name(7))
    (tmp_path / "file").touch()
    (folder / DESTINATION).write_text(str(tmp_path / "file" / "checkpoints"))
    return folder


def test_steps_that_cannot_be_saved_are_kept_in_the_home_folder(
    tmp_path: Path, rescued: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The second one failed with a traceback because the first one's folder existed.
    monkeypatch.setenv("HOME", str(tmp_path))
    for _ in range(2):
        line, is_saved = keep(rescued) or ("", True)
        assert not is_saved
        assert line.startswith(f"step 7 cannot be saved to {tmp_path}/file/checkpoints (")
        before, _, remedy = line.rpartition("; to resume from it, ")
        assert remedy == f"make room and move that folder to {tmp_path}/file/checkpoints"
        kept = Path(before.rpartition("; it is kept in ")[2])
        assert kept.name == step_name(7)
        assert {file.name for file in kept.iterdir()} == {file.name for file in (rescued / step_name(7)).iterdir()}


def test_modules_in_the_working_folder_do_not_shadow_those_of_the_rescue(
    tmp_path: Path, rescued: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "checkpoints").mkdir()
    (rescued / DESTINATION).write_text(str(tmp_path / "checkpoints"))
    script(tmp_path, "", "random.py")
    script(tmp_path, "", "torch.py")
    monkeypatch.chdir(tmp_path)
    lines: list[str] = []
    Restarts(tmp_path / "job", None).keep_rescued(lines.append)
    assert lines == [f"the last completed step, 7, is saved to {tmp_path / 'checkpoints' / step_name(7)}"]


def test_a_folder_whose_name_is_not_utf_8_is_found(tmp_path: Path, rescued: Path) -> None:
    folder = tmp_path / os.fsdecode(b"run-\xff")
    folder.mkdir()
    (rescued / DESTINATION).write_bytes(bytes(folder))
    assert keep(rescued) == (f"the last completed step, 7, is saved to {folder / step_name(7)}", True)


def test_a_step_that_cannot_be_kept_is_reported_lost(
    tmp_path: Path, rescued: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The report was buried at the end of a traceback.
    monkeypatch.setenv("HOME", str(tmp_path / "file"))
    line, is_saved = keep(rescued) or ("", True)
    assert not is_saved
    assert line.endswith("; it is lost because it cannot be copied to the home folder either (Not a directory)")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(shutil, "copytree", full)
    line, _ = keep(rescued) or ("", True)
    assert line.endswith("either (No space left on device)")
    assert not list(tmp_path.glob("rescued-*"))


def full(*_: object) -> None:
    """Fail as ``shutil.copytree`` does on a full disk."""
    raise shutil.Error([("a", "b", "No space left on device")])
