"""``paceline train digits`` from the user's side: output, refusals, and exits of real processes."""

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
    """Run the command with `options` to completion."""
    return paceline(folder, "train", "digits", "--nproc", str(nproc), *options, fork="all", OMP_NUM_THREADS="1")


def contents(folder: Path) -> dict[str, bytes | None]:
    """Map every path below `folder` to its bytes (None for folders), without the test's own files."""
    ours = {folder / name for name in ("stdout", "stderr", "tmp", "torch")}
    paths = [path for path in folder.rglob("*") if not ours & {path, *path.parents}]
    return {str(path): path.read_bytes() if path.is_file() else None for path in paths}


def pids_in(folder: Path) -> list[int]:
    """Return the IDs of the processes that work in `folder`."""
    pids = []
    for entry in os.listdir("/proc"):
        if entry.isdigit() and alive(int(entry)):
            try:
                if Path(os.readlink(f"/proc/{entry}/cwd")) == folder:
                    pids.append(int(entry))
            except OSError:
                continue
    return pids


def assert_refused(folder: Path, done: Any, unchanged: dict[str, bytes | None], message: str) -> None:
    """Require exit code 2, one line on stderr that contains `message`, an empty stdout and an unchanged folder."""
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1, done.stderr
    assert message in done.stderr
    assert contents(folder) == unchanged
    assert pids_in(folder) == []


def test_refusal_by_the_ranks_is_one_line_and_makes_no_folder(tmp_path: Path) -> None:
    (tmp_path / "plain").write_text("not a folder")
    unchanged = contents(tmp_path)
    done = digits(tmp_path, "--checkpoint-dir", "plain/points", nproc=2)
    message = "plain/points cannot be used: Not a directory; choose a folder"
    assert_refused(tmp_path, done, unchanged, message)


# -- a run and its files ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A completed two-rank run and its folder; its checkpoint folder already held another file."""
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


def test_json_report_is_complete_and_unrelated_files_are_kept(finished: tuple[Path, Any]) -> None:
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
    assert pids_in(tmp_path) == []
    with Checkpointer(tmp_path / "points") as checkpointer:
        newest = checkpointer.steps()[-1]
        assert checkpointer.latest() == tmp_path / "points" / f"step-{newest:08d}"
        assert newest == int(saved)
