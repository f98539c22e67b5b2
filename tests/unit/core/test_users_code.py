"""Errors and warnings name a line in the user's code, not in torch, Python or this package."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import paceline
from paceline.core.stacks import place_in
from paceline.errors import UsageError
from processes import paceline as run
from processes import script

SOURCE = Path(paceline.__file__).parent
MISTAKES = {
    "a method that all ranks call": "checkpointer.save(-1)  # here",
    "in a function": "def work():\n    checkpointer.restore(only=['nothing'])  # here\nwork()",
    "in a with block": "with checkpointer:\n    checkpointer.save(-1)  # here",
    "through autograd": (
        "ddp = paceline.DistributedDataParallel(torch.nn.Linear(2, 2), unused_parameters='error')\n"
        "ddp(torch.ones(1, 2)).sum().backward()\n"
        "ddp.module.bias * 1\n"
        "(ddp(torch.ones(1, 2)) * 0 + ddp.module.weight.sum()).sum().backward(); checkpointer.save(-1)  # here"
    ),
}
BEGIN = """
import torch, paceline
paceline.init()
checkpointer = paceline.Checkpointer("saved")
"""


def line_of(text: str) -> int:
    return next(number for number, line in enumerate(text.splitlines(), 1) if line.endswith("# here"))


@pytest.mark.ranks(1)
def test_a_mistake_names_the_users_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Errors in collective methods named contextlib.py, line 81.
    for name, code in MISTAKES.items():
        (folder := tmp_path / name).mkdir()
        monkeypatch.chdir(folder)
        text = BEGIN + code
        with pytest.raises(UsageError) as mistake:
            exec(compile(text, "/home/me/script.py", "exec"), {})
        assert place_in(mistake.tb) == f" (/home/me/script.py, line {line_of(text)})"


def test_code_without_a_file_is_named(tmp_path: Path) -> None:
    done = run(tmp_path, program=("-c", BEGIN + "checkpointer.save(-1)  # here"), fork="all")
    assert done.stderr.splitlines()[-1].endswith("(<string>, line 5)")


def test_a_warning_names_the_users_line(tmp_path: Path) -> None:
    text = BEGIN + (
        "import os\nos.mkdir('saved/step-00000001')\ndef work():\n    checkpointer.latest()  # here\nwork()\n"
        "import threading"
    )
    done = run(tmp_path, "run", script(tmp_path, text), fork="all")
    assert done.returncode == 0, done.stderr
    assert f"script.py:{line_of(text)}: CheckpointWarning: the checkpoint " in done.stderr


def test_no_warning_counts_frames() -> None:
    # A fixed number of frames is wrong as soon as a decorator or helper is added.
    assert not [path.name for path in SOURCE.rglob("*.py") if re.search(r"stacklevel=", path.read_text())]
