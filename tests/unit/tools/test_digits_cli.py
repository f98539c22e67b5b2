"""``paceline train digits`` from the user's side: output, refusals, and exits of real processes."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from json_page import check
from paceline.checkpoint import Checkpointer
from processes import Running, gone_after, paceline
from recipe_reports import FIELDS

KEPT = ["--checkpoint-dir", "points"]


def digits(folder: Path, *options: str, nproc: int = 1) -> Any:
    """Run the command with `options` to completion."""
    return paceline(folder, "train", "digits", "--nproc", str(nproc), *options, fork="all", OMP_NUM_THREADS="1")


PROMISED = {"accuracy": float, "test_loss": float, **FIELDS}


def test_json_report_is_complete_and_unrelated_files_are_kept(tmp_path: Path) -> None:
    (tmp_path / "points").mkdir()
    (tmp_path / "points" / "thesis.tex").write_text("…")
    options = ["--epochs", "1", "--batch-size", "128", "--json", "report.json", "--evaluate-every", "5"]
    done = digits(tmp_path, *options, *KEPT, "--metrics", "metrics.jsonl", nproc=2)
    assert (done.returncode, done.stderr) == (0, "")
    report = json.loads((tmp_path / "report.json").read_text())
    assert {name: type(value) for name, value in report.items()} == PROMISED
    check("paceline train --json FILE", report)
    assert (report["steps"], report["world_size"], report["replicas_identical"]) == (12, 2, True)
    assert report["gradient_bytes_per_step"] == 30_634 * 4
    first, second = report["replica_sha256"]
    assert first == second
    assert len(bytes.fromhex(first)) == 32
    assert 0 <= report["exposed_share"] <= 1
    assert 0 < report["accuracy"] <= 1
    assert report["samples_per_second"] == pytest.approx(1437 / report["seconds"])
    assert sorted(os.listdir(tmp_path / "points")) == ["step-00000012", "thesis.tex"]
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "eval/test_loss" in line] == [5, 10, 12]


def test_ctrl_c_ends_all_ranks_after_a_saved_step(tmp_path: Path) -> None:
    options = ["--nproc", "2", "--epochs", "1000", *KEPT, "--checkpoint-every", "10"]
    with Running(tmp_path, "train", "digits", *options, fork="all") as job:
        job.wait_for("points/step-00000020")
        ranks = job.family()[1:]
        job.process.send_signal(signal.SIGINT)
        assert job.wait() == 130
        gone_after(ranks, 5)
        said = r"interrupted, after step (\d+) was saved\nthe checkpoints in points are kept; .* with --resume\n$"
        [saved] = re.findall(said, job.stderr)
    with Checkpointer(tmp_path / "points") as checkpointer:
        newest = checkpointer.steps()[-1]
        assert checkpointer.latest() == tmp_path / "points" / f"step-{newest:08d}"
        assert newest == int(saved)


def test_sigterm_without_a_checkpoint_folder_says_that_nothing_is_saved(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    options = ["--nproc", "2", "--epochs", "1000", "--metrics", str(metrics)]
    with Running(tmp_path, "train", "digits", *options, fork="all") as job:
        job.wait_until(lambda: metrics.exists() and metrics.read_text() != "", "no metrics")
        job.process.send_signal(signal.SIGTERM)
        assert job.wait() == 143
        assert "nothing is saved, because the training has no checkpoint folder" in job.stderr
        assert "Traceback" not in job.stderr
