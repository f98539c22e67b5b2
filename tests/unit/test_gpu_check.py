"""The script that checks a machine with GPUs, as far as it can be tried without one."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

SCRIPT = Path(__file__).parents[2] / "scripts" / "gpu_check.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    sys.path.insert(0, str(SCRIPT.parent))
    try:
        return importlib.import_module("gpu_check")
    finally:
        sys.path.remove(str(SCRIPT.parent))


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True, timeout=100)


def test_on_cpu_ranks_every_check_holds() -> None:
    ended = run("--device", "cpu", "--ranks", "2", "--rounds", "1", "--json")
    assert ended.returncode == 0, ended.stderr + ended.stdout
    rows = json.loads(ended.stdout)["rows"]
    judged = [row for row in rows if row["ok"] is not None]
    assert len(judged) >= 12
    assert all(row["ok"] and row["ranks"] == 2 for row in judged)
    assert sum("torch DDP / this" in row["value"] for row in rows) == 3


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_it_says_so_in_one_line(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [str(SCRIPT)])
    assert script.main() == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert "no CUDA GPU" in err


def test_a_number_of_ranks_below_one_is_refused(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), "--device", "cpu", "--ranks", "0"])
    with pytest.raises(SystemExit) as refused:
        script.main()
    assert refused.value.code == 2
    assert "--ranks" in capsys.readouterr().err


def test_a_check_fails_if_it_does_on_any_rank(script: ModuleType) -> None:
    good, bad = script.Row(2, "a check", "1e-9", True), script.Row(2, "a check", "0.5", False)
    rows = script.merged(2, {0: [good], 1: [bad]})
    assert rows == [script.Row(2, "a check", "rank 1: 0.5", False)]
    assert script.exit_code(rows) == 1
    assert script.exit_code([good]) == 0


def test_a_rank_that_gives_no_answer_is_a_failure(script: ModuleType) -> None:
    rows = script.merged(2, {0: [script.Row(2, "a check", "", True)]})
    assert not rows[-1].ok
    assert "[1]" in rows[-1].value


def test_the_timed_model_has_the_parameters_of_smollm2(script: ModuleType) -> None:
    with torch.device("meta"):
        models = sys.modules["gpu_models"]
        model = models.Llama(models.SHAPES["SmolLM2-360M"])
    assert sum(parameter.numel() for parameter in model.parameters()) == 361_821_120
