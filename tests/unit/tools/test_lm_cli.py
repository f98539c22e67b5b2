"""``paceline train lm`` as its users meet it: what it says, what it refuses, how it ends. Real processes."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import UsageError
from paceline.tools.recipes.lm import LmConfig
from processes import paceline
from recipe_reports import FIELDS

TEXT = "so we'll live, and pray, and sing, and tell old tales, and laugh\n" * 60
SMALL = ["--context", "32", "--width", "16", "--layers", "1", "--heads", "2", "--epochs", "1", "--batch-size", "32"]


def lm(folder: Path, *options: str, nproc: int = 1) -> Any:
    """Run the command with `options` to its end."""
    arguments = ("train", "lm", "--nproc", str(nproc), *options)
    return paceline(folder, *arguments, fork="all", OMP_NUM_THREADS="1")


def written(folder: Path) -> dict[str, bytes]:
    """A file of each kind that is refused, and one that is not."""
    files = {
        "text.txt": TEXT.encode(),
        "empty.txt": b"",
        "latin.txt": b"na\xefve " * 100,
        "short.txt": b"to be, or not",
    }
    for name, content in files.items():
        (folder / name).write_bytes(content)
    (folder / "folder").mkdir()
    return files


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no data": ({"data": None}, "--data is missing; give a text file: --data file.txt"),
    "an empty name": ({"data": ""}, "--data is missing"),
    "no such file": ({"data": "nowhere.txt"}, "--data nowhere.txt cannot be read: No such file or directory"),
    "a folder": ({"data": "folder"}, "--data folder cannot be read: Is a directory"),
    "an empty file": ({"data": "empty.txt"}, "--data empty.txt is empty; give a file with text"),
    "not UTF-8": ({"data": "latin.txt"}, "--data latin.txt is not in UTF-8: byte 2 is 0xef; convert it"),
    "shorter than a sequence": ({"data": "short.txt"}, "have 11 characters and must have 129, one more than --context"),
    "no context": ({"context": 0}, "--context must be at least 1, not 0"),
    "no heads": ({"heads": 0}, "--heads must be at least 1, not 0"),
    "heads that do not fit": ({"width": 24, "heads": 8}, "--width 24 must be a multiple of twice --heads 8"),
    "a negative sample": ({"sample": -1}, "--sample must be at least 0, not -1"),
    "a learning rate of nan": ({"lr": math.nan}, "--lr must be a finite number greater than 0, not nan"),
    "a sharded Muon": ({"sharded": True}, "--sharded cannot shard Muon"),
    "what every recipe refuses": ({"epochs": 0}, "--epochs must be at least 1, not 0"),
}


@pytest.mark.parametrize(("options", "message"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_work_is_refused_before_any_rank_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], message: str
) -> None:
    written(tmp_path)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError) as refused:
        LmConfig(**{"data": "text.txt", **options}).check()
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


PROMISED = {"loss": float, "perplexity": float, "tokens_per_second": float, **FIELDS}


def test_a_run_reports_loss_perplexity_tokens_per_second_and_writes_on(tmp_path: Path) -> None:
    written(tmp_path)
    done = lm(tmp_path, "--data", "text.txt", *SMALL, "--sample", "40", "--json", "report.json", nproc=2)
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
    table, sample = done.stdout.split("A sample of what it writes:\n")
    assert "lm, 2 ranks" in table
    assert len(sample) == 1 + 40 + 1  # the token to begin with, those asked for, and print's end of line
    assert set(sample) <= set(TEXT)
