"""Which versions of torch were tested, and what is said about others."""

from __future__ import annotations

import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

from paceline.core.torch_internals import versions as supported
from paceline.errors import UntestedTorchWarning
from paceline.tools.cli import env
from processes import TIMEOUT_S, paceline

VERSIONS = {
    "1.13.1": "older",
    "2.10.0": "older",
    "2.11.0": None,
    "2.13.0+cpu": None,
    "2.15.0+cu132": None,
    "2.15.1": None,
    "2.16.0": "newer",
    "2.16.0a0+git1f2": "newer",
    "2.16.0.dev20261122": "newer",
    "2.101.0": "newer",
    "3.0": "newer",
    "main": "not a version",
}


@pytest.mark.parametrize(("version", "word"), VERSIONS.items())
def test_a_version_is_tested_older_or_newer(version: str, word: str | None) -> None:
    matter = supported.untested(version)
    assert matter is None if word is None else str(matter).startswith(word)


def test_pip_is_asked_for_the_versions_that_were_tested() -> None:
    # Without an upper bound an install brought a torch that nothing had been tried with.
    root = Path(__file__).parents[3]
    (wanted,) = re.findall(r'"(torch[<>=][^"]*)"', (root / "pyproject.toml").read_text())
    assert f"'{wanted}'" in supported.INSTALL
    assert f"PyTorch {supported.RANGE}" in (root / "README.md").read_text()


@pytest.fixture
def newer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.99.0")
    for name in ("RANK", "PACELINE_LAUNCHER"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("newer")
@pytest.mark.parametrize(("name", "value"), [("RANK", "1"), ("PACELINE_LAUNCHER", "7")])
def test_one_process_of_a_job_says_it(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    with pytest.warns(UntestedTorchWarning, match=r"^torch 2\.99\.0 is newer than .*; if something goes wrong, try pi"):
        supported.warn_if_untested()
    monkeypatch.setenv(name, value)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        supported.warn_if_untested()
    assert caught == []


@pytest.mark.usefixtures("newer")
def test_env_says_whether_torch_was_tested(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "2.99.0" in (said := env.describe()["torch"])
    assert "newer than the versions that Paceline was tested with" in said
    monkeypatch.setattr(torch, "__version__", "2.13.0")
    assert "Paceline was tested with 2.11 to 2.15" in env.describe()["torch"]


def test_import_warns_at_the_users_line(tmp_path: Path) -> None:
    code = "import sys, torch\ntorch.__version__ = '2.10.1'\nsys.modules.pop('paceline', None); import paceline\n"
    done = paceline(tmp_path, program=("-c", code), fork="all")
    assert done.returncode == 0
    assert done.stderr.startswith("<string>:3: UntestedTorchWarning: torch 2.10.1 is older than the versions")
    assert done.stderr.count("UntestedTorchWarning") == 1


@pytest.mark.slow
def test_the_command_warns_when_it_starts_ranks_and_not_for_its_help(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("print('ran')")
    code = (
        "import sys, paceline_command, paceline\n"
        "assert 'torch' not in sys.modules\n"
        "import torch\n"
        "torch.__version__ = '2.10.1'\n"
        "sys.argv = ['paceline', 'run', '--nproc', '1', 'script.py']\n"
        "paceline_command.main()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert (done.returncode, done.stdout) == (0, "ran\n"), done.stderr
    assert done.stderr.count("UntestedTorchWarning: torch 2.10.1 is older than the versions") == 1
