"""``paceline train digits`` as its users meet it: what it says, what it refuses, how it ends. Real processes."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from paceline.checkpoint import Checkpointer
from processes import Running, alive, paceline
from recipe_reports import FIELDS

SHORT = ["--epochs", "1", "--batch-size", "128"]
KEPT = ["--checkpoint-dir", "points"]


def digits(folder: Path, *options: str, nproc: int = 1) -> Any:
    """Run the command with `options` to its end."""
    return paceline(folder, "train", "digits", "--nproc", str(nproc), *options, fork="all", OMP_NUM_THREADS="1")


def contents(folder: Path) -> dict[str, bytes | None]:
    """Every file below `folder` with its bytes, and every folder; without what the test itself puts there."""
    ours = {folder / name for name in ("stdout", "stderr", "tmp", "torch")}
    found = [path for path in folder.rglob("*") if not ours & {path, *path.parents}]
    return {str(path): path.read_bytes() if path.is_file() else None for path in found}


def living_in(folder: Path) -> list[int]:
    """Process ids of whoever works in `folder`."""
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit() and alive(int(entry)):
            try:
                if Path(os.readlink(f"/proc/{entry}/cwd")) == folder:
                    found.append(int(entry))
            except OSError:
                continue
    return found


def assert_refused(folder: Path, done: Any, before: dict[str, bytes | None], message: str) -> None:
    """Exit code 2, one line on stderr that says `message`, nothing on stdout, nothing left behind."""
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1, done.stderr
    assert message in done.stderr
    assert contents(folder) == before
    assert living_in(folder) == []


def test_a_refusal_by_the_ranks_is_one_line_and_no_folder_is_made(tmp_path: Path) -> None:
    (tmp_path / "plain").write_text("not a folder")
    before = contents(tmp_path)
    done = digits(tmp_path, "--checkpoint-dir", "plain/points", nproc=2)
    message = "plain/points cannot be used: Not a directory; choose a folder"
    assert_refused(tmp_path, done, before, message)


# -- a run and what it leaves ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """The folder of a run of two ranks that has ended, and the run; its folder of checkpoints held another file."""
    folder = tmp_path_factory.mktemp("finished")
    (folder / "points").mkdir()
    (folder / "points" / "thesis.tex").write_text("…")
    options = ["--json", "report.json", "--evaluate-every", "5", "--metrics", "metrics.jsonl"]
    done = digits(folder, *SHORT, *KEPT, *options, nproc=2)
    return folder, done


@pytest.fixture
def points(finished: tuple[Path, Any], tmp_path: Path) -> Path:
    """A folder with a copy of that run's checkpoints."""
    shutil.copytree(finished[0] / "points", tmp_path / "points")
    return tmp_path


PROMISED = {"accuracy": float, "test_loss": float, **FIELDS}


def test_json_holds_what_was_promised_and_another_file_is_kept(finished: tuple[Path, Any]) -> None:
    folder, done = finished
    assert (done.returncode, done.stderr) == (0, "")
    report = json.loads((folder / "report.json").read_text())
    assert {name: type(value) for name, value in report.items()} == PROMISED
    assert (report["steps"], report["world_size"], report["replicas_identical"]) == (12, 2, True)
    assert report["gradient_bytes_per_step"] == 30_634 * 4
    first, second = report["replica_sha256"]
    assert first == second
    assert len(bytes.fromhex(first)) == 32
    assert 0 <= report["exposed_share"] <= 1
    assert 0 < report["accuracy"] <= 1
    assert report["samples_per_second"] == pytest.approx(1437 / report["seconds"])
    assert sorted(os.listdir(folder / "points")) == ["step-00000012", "thesis.tex"]
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "eval/test_loss" in line] == [5, 10, 12]


def test_ctrl_c_ends_all_ranks_after_a_saved_step(tmp_path: Path) -> None:
    options = ["--nproc", "2", "--epochs", "1000", *KEPT, "--checkpoint-every", "10"]
    with Running(tmp_path, "train", "digits", *options, fork="all") as job:
        job.wait_for("points/step-00000020")
        job.process.send_signal(signal.SIGINT)
        assert job.wait() == 130
        said = r"interrupted, after step (\d+) was saved\nthe checkpoints in points are kept; .* with --resume\n$"
        [saved] = re.findall(said, job.stderr)
    assert living_in(tmp_path) == []
    with Checkpointer(tmp_path / "points") as checkpointer:
        newest = checkpointer.steps()[-1]
        assert checkpointer.latest() == tmp_path / "points" / f"step-{newest:08d}"
        assert newest == int(saved)
