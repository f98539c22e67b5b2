"""A user's mistake is one line or one traceback, and is not made again."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from processes import paceline, script

LOOP = """
import os, torch, paceline
from paceline.errors import MissingExtra, UsageError
world = paceline.init()
how = {how!r}
if how == "killed" and world.rank == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    os.kill(os.getpid(), 9)
model = paceline.DistributedDataParallel(torch.nn.Linear(2, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
checkpointer = paceline.Checkpointer("saved")
checkpointer.register("model", model)
step = checkpointer.restore() if checkpointer.steps() else 0
while step < 6:
    if step == 3 and how == "usage":
        raise UsageError("lr=7 is not a thing; give another")
    if step == 3 and how == "extra" and world.rank == 0:
        raise MissingExtra("tensorboard", "tensorboard", "writing files")
    if step == 3 and how == "error" and world.rank == 1:
        raise ValueError("the labels are wrong")
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    step = checkpointer.step()
print("done", step)
"""


def test_too_low_a_limit_of_open_files_is_one_line(tmp_path: Path) -> None:
    # It was a traceback from the middle of starting a process.
    command = f"ulimit -n 20; exec {sys.executable} -m paceline run --nproc 2 {script(tmp_path, 'print(1)')}"
    done = subprocess.run(["bash", "-c", command], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        "error: a process may open 20 files here, and 2 ranks need about 28; raise the limit first: ulimit -n 1024"
    ]


@pytest.mark.parametrize(
    ("how", "code", "starts", "last"),
    [
        ("usage", 2, 1, "error: lr=7 is not a thing; give another ("),
        ("extra", 2, 1, "error: writing files needs the package 'tensorboard'"),
        ("error", 1, 2, "error: rank 1 failed first (exit code 1: ValueError: the labels are wrong)"),
        ("killed", 0, 2, "rank 1 failed first (signal SIGKILL"),
    ],
)
def test_mistakes_end_the_job_and_early_kills_do_not(
    tmp_path: Path, how: str, code: int, starts: int, last: str
) -> None:
    done = paceline(tmp_path, "run", "--nproc", "2", script(tmp_path, LOOP.format(how=how)), fork="all")
    assert done.returncode == code, done.stderr
    assert done.stderr.count("starting all ranks again") == starts - 1
    assert done.stderr.splitlines()[-1].startswith(last), done.stderr
    assert ("Traceback" in done.stderr) is (how == "error")
    if how in ("usage", "extra"):
        assert "script.py, line " in done.stderr
    if how == "error":
        assert "the same error in the same place ended the start before" in done.stderr
