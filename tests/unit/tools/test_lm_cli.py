"""``paceline train lm`` from the user's side: its output and generated text, with real processes."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from processes import paceline
from recipe_reports import FIELDS

TEXT = "so we'll live, and pray, and sing, and tell old tales, and laugh\n" * 60
SMALL = ["--context", "32", "--width", "16", "--layers", "1", "--heads", "2", "--epochs", "1", "--batch-size", "32"]


PROMISED = {"loss": float, "perplexity": float, "tokens_per_second": float, **FIELDS}


def test_run_reports_its_figures_and_generates_text(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(TEXT)
    options = ["--data", "text.txt", *SMALL, "--sample", "40", "--json", "report.json"]
    done = paceline(tmp_path, "train", "lm", "--nproc", "2", *options, fork="all", OMP_NUM_THREADS="1")
    assert (done.returncode, done.stderr) == (0, "")
    report = json.loads((tmp_path / "report.json").read_text())
    assert {name: type(value) for name, value in report.items()} == PROMISED
    assert (report["world_size"], report["replicas_identical"]) == (2, True)
    assert report["perplexity"] == pytest.approx(math.exp(report["loss"]))
    assert report["tokens_per_second"] == pytest.approx(32 * report["samples_per_second"])
    lines = [" ".join(line.replace("│", " ").split()) for line in done.stdout.splitlines()]
    assert f"loss {report['loss']:.4f}" in lines
    assert f"perplexity {report['perplexity']:.4f}" in lines
    assert any(line.startswith("tokens per second") for line in lines)
    table, sample = done.stdout.split("A sample of the model's text:\n")
    assert "lm, 2 ranks" in table
    assert len(sample) == 1 + 40 + 1  # the prompt token, the requested tokens and the newline of print
    assert set(sample) <= set(TEXT)
