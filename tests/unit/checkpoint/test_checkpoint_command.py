"""``paceline checkpoint``: lists and verifies checkpoints, and exports files for torch and safetensors."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file
from test_checkpoint_roundtrip import Holder, Tied, opened, same
from torch import nn

from insides import manifest, metadata_of, step_name
from json_page import check
from processes import run_here


class Done(NamedTuple):
    code: int
    out: str
    err: str


Command = Callable[..., Done]


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Command:
    """Return a function that runs ``paceline checkpoint …`` in this process."""

    def run(*arguments: Any) -> Done:
        capfd.readouterr()
        code = run_here(monkeypatch, "checkpoint", *map(str, arguments))
        return Done(int(code or 0), *capfd.readouterr())

    return run


def refused(done: Done) -> str:
    """Return the one-line error of a command that refused its input."""
    assert (done.code, done.out) == (2, ""), done
    [line] = done.err.splitlines()
    assert line.startswith("error: ")
    return line


def normalized() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, nn.Module]]:
    """A run with steps 1, 2 and 3 (the best is 2), and its modules."""
    folder = tmp_path_factory.mktemp("saved") / "run"
    model, tied = normalized(), Tied()
    optimizer = torch.optim.AdamW(model.parameters())
    objects = {"model": model, "optimizer": optimizer, "tied": tied, "notes": Holder({"tensor": "none"})}
    with opened(folder, objects, keep_best="acc") as checkpointer:
        checkpointer.register("own", Holder({"seen": torch.arange(3)}), per_rank=True)
        for step, acc in ((1, 1.0), (2, 5.0), (3, 2.0)):
            model(torch.randn(4, 3)).sum().backward()
            optimizer.step()
            checkpointer.save(step, {"acc": acc, "curve": (float("nan"), 1)}, protect=step == 1)
    return folder, {"model": model, "tied": tied}


@pytest.fixture
def run_folder(saved: tuple[Path, Any], tmp_path: Path) -> Path:
    """A copy of the run."""
    return shutil.copytree(saved[0], tmp_path / "run")


def flip(path: Path, at: int = -1) -> None:
    raw = bytearray(path.read_bytes())
    raw[at] ^= 1
    path.write_bytes(raw)


# list


def test_list_marks_complete_latest_best_and_protected_steps(run_folder: Path, command: Command) -> None:
    done = command("list", run_folder)
    assert (done.code, done.err) == (0, "")
    heading, *rows = [line.split() for line in done.out.splitlines()]
    assert heading == ["step", "size", "age", "state", "metadata"]
    assert [row[0] for row in rows] == ["1", "2", "3"]
    assert [row[6] for row in rows] == ["protected", "best", "latest"]
    assert all(row[5] == "complete" and "curve=(nan," in row for row in rows)
    report = json.loads(command("list", run_folder, "--json").out)
    check("paceline checkpoint list --json", report)
    assert (report["latest"], report["best"]) == (3, 2)
    rows = report["checkpoints"]
    assert [row["metadata"]["acc"] for row in rows] == [1.0, 5.0, 2.0]
    assert rows[0]["metadata"]["curve"] == ["nan", 1]  # JSON has no NaN
    for row in rows:
        path = Path(row["path"])
        assert row["nbytes"] == sum(file.stat().st_size for file in path.iterdir())
        assert row["saved_at"] == (path / manifest.NAME).stat().st_mtime


# verify


def test_verify_accepts_an_undamaged_run(run_folder: Path, command: Command) -> None:
    done = command("verify", run_folder)
    assert (done.code, done.err) == (0, "")
    assert [line.split(" (")[0] for line in done.out.splitlines()] == [f"step {step}: complete" for step in (1, 2, 3)]
    assert command("verify", run_folder / "step-00000002").out.startswith("step 2: complete")


def test_verify_names_damaged_files_and_the_objects_in_them(run_folder: Path, command: Command) -> None:
    path = run_folder / "step-00000002"
    flip(path / "model.safetensors")
    flip(path / "rank-00000.safetensors", at=-9)
    flip(path / "metadata.json", at=40)
    (path / "optimizer.safetensors").unlink()
    done = command("verify", run_folder)
    assert (done.code, done.err) == (1, "")
    lines = [line for line in done.out.splitlines() if line.startswith("step 2: damaged: ")]
    assert len(lines) == 4
    text = "\n".join(lines)
    assert "of model.safetensors does not have the SHA-256 that the manifest states (7 tensors of 'model')" in text
    assert "optimizer.safetensors is missing (12 tensors of 'optimizer')" in text
    assert "rank-00000.safetensors does not" in text
    assert "of rank 0's own objects)" in text
    assert "metadata.json" in text
    assert "step 1: complete" in done.out
    assert command("verify", run_folder / "step-00000001").code == 0
    report = command("verify", run_folder, "--json")
    assert report.code == 1
    assert json.loads(report.out)["damaged"] == [2]
    check("paceline checkpoint verify --json", json.loads(report.out))
    assert len(json.loads(report.out)["checkpoints"][1]["damages"]) == 4


def test_a_newer_format_is_refused_with_the_remedy(run_folder: Path, command: Command) -> None:
    path = run_folder / step_name(3) / manifest.NAME
    path.write_text(path.read_text().replace('"format_version": 1', '"format_version": 2'))
    for arguments in (("list",), ("verify",), ("export", "--out", run_folder / "model.pt")):
        done = command(*arguments, run_folder)
        assert done.code == 2
        assert "step-00000003 has format 2, but this version of Paceline reads formats up to 1; update" in done.err


def test_terminal_control_characters_are_escaped(tmp_path: Path, command: Command) -> None:
    with opened(tmp_path, {"model": Holder({})}) as checkpointer:
        checkpointer.save(1, {"\x1b]0;title\x07": "[bold]\nnext"})
    out = command("list", tmp_path).out
    assert "\x1b" not in out
    assert r"\x1b" in out
    assert r"[bold]\nnext" in out


# export


@pytest.mark.parametrize(("name", "file"), [("model", "w.pt"), ("tied", "w.pt"), ("tied", "w.safetensors")])
def test_export_writes_the_state_dict_without_unpickling(
    saved: tuple[Path, dict[str, nn.Module]],
    command: Command,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    file: str,
) -> None:
    def refuse(*arguments: object, **options: object) -> None:
        raise AssertionError("something was unpickled")

    run, modules = saved
    with monkeypatch.context() as patch:
        for owner, function in ((torch, "load"), (pickle, "load"), (pickle, "loads"), (pickle, "Unpickler")):
            patch.setattr(owner, function, refuse)
        done = command("export", run, "--out", tmp_path / file, "--name", name)
    assert (done.code, done.err) == (0, "")
    as_torch = file == "w.pt"
    state = torch.load(tmp_path / file, weights_only=True) if as_torch else load_file(tmp_path / file)
    expected = modules[name].state_dict()
    assert same(dict(sorted(state.items())), dict(sorted(expected.items())))  # including the names of tied weights
    if as_torch:
        assert list(state) == list(expected)
        assert metadata_of(state) == metadata_of(expected)
    assert os.listdir(tmp_path) == [file]


def test_export_takes_the_newest_undamaged_step(run_folder: Path, command: Command, tmp_path: Path) -> None:
    flip(run_folder / "step-00000003" / "model.safetensors")
    done = command("export", run_folder, "--out", tmp_path / "m.pt")
    assert "'model' of step 2, 7 tensors" in done.out
    assert done.err.startswith("warning: the checkpoint ")
    message = "step-00000003 is damaged and skipped: the content of model.safetensors"
    assert message in done.err
    for step in ("1", "2"):
        flip(run_folder / f"step-0000000{step}" / "model.safetensors")
    failed = command("export", run_folder, "--out", tmp_path / "n.pt")
    assert failed.code == 2
    assert message in failed.err
    line = refused(command("export", run_folder / "step-00000003", "--out", tmp_path / "n.pt"))
    assert "step-00000003 is damaged: the content of model.safetensors" in line


def test_export_overwrites_no_file_and_changes_no_checkpoint(
    run_folder: Path, command: Command, tmp_path: Path
) -> None:
    (tmp_path / "m.pt").write_text("mine")
    (tmp_path / "link.pt").symlink_to(tmp_path / "nowhere")
    os.mkfifo(tmp_path / "pipe.pt")
    inside = run_folder / "step-00000003" / "model.safetensors"
    for out in (tmp_path / "m.pt", tmp_path / "link.pt", tmp_path / "pipe.pt", inside):
        assert "already exists; remove it" in refused(command("export", run_folder, "--out", out))
    assert (tmp_path / "m.pt").read_text() == "mine"
    line = refused(command("export", run_folder, "--out", inside.with_name("new.pt")))
    assert "is inside the checkpoint" in line
    assert command("verify", run_folder).code == 0


def test_a_linked_checkpoint_is_verified_but_never_written(run_folder: Path, command: Command, tmp_path: Path) -> None:
    moved = (run_folder / "step-00000003").rename(tmp_path / "moved")
    (run_folder / "step-00000003").symlink_to(moved)
    (run_folder / "step-00000009").symlink_to(tmp_path / "nowhere")
    assert command("verify", run_folder / "step-00000003").code == 0
    done = command("verify", run_folder)
    assert "step 3: complete" in done.out
    assert f"step 9: damaged: it is a link to {tmp_path}/nowhere, which cannot be opened" in done.out
    line = refused(command("export", run_folder, "--out", run_folder / "step-00000003" / "new.pt"))
    assert "is inside the checkpoint" in line


# bad input


def test_a_folder_without_checkpoints_is_a_one_line_error(tmp_path: Path, command: Command) -> None:
    out = ("--out", tmp_path / "out.pt")
    (tmp_path / "file").write_text("")
    for name in ("empty", "step-00000007"):
        (tmp_path / name).mkdir()
    assert "nowhere does not exist; give the folder" in refused(command("verify", tmp_path / "nowhere"))
    assert "file is not a folder; give the folder" in refused(command("list", tmp_path / "file"))
    for name, more in (("list", ()), ("verify", ()), ("export", out)):
        assert "has no checkpoints" in refused(command(name, tmp_path / "empty", *more))
    assert "manifest.json is missing" in refused(command("export", tmp_path / "step-00000007", *out))
    assert not (tmp_path / "out.pt").exists()


def test_bad_targets_and_names_are_one_line_errors(run_folder: Path, tmp_path: Path, command: Command) -> None:
    def line(*arguments: Any) -> str:
        return refused(command("export", run_folder, *arguments))

    assert "nothing is saved as 'ema' in" in line("--out", tmp_path / "o", "--name", "ema")
    assert "which has ['model', 'notes', 'optimizer', 'tied']" in line("--out", tmp_path / "o", "--name", "own")
    assert "holds only tensors; give --out a name that ends" in line("--out", tmp_path / "o", "--name", "optimizer")
    assert "the folder" in line("--out", tmp_path / "no" / "o")
    assert "it is a folder" in line("--out", tmp_path)
    assert "cannot be written" in line("--out", "/proc/self/o")
    assert "--out is empty" in line("--out", "")
    assert "--out" in refused(command("export", run_folder))
    assert sorted(os.listdir(tmp_path)) == ["run"]
