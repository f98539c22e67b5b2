"""The launcher blames the rank that failed first in real jobs, and shows its error once."""

from __future__ import annotations

import re
import signal
import sys
from pathlib import Path

import pytest

from forked import REAL_END
from paceline.launch import rank_processes
from paceline.launch.agent import launch
from paceline.launch.job import Job
from processes import Running, paceline, script

# With four ranks, 7 of 11 deaths blamed the wrong rank: reports about the dead rank were taken for the cause.
DYING = """
import os, signal, sys, torch, torch.distributed as dist
import paceline
backend, place, death = sys.argv[1:]

def die():
    if death == "abort": os.abort()
    if death == "kill": os.kill(os.getpid(), signal.SIGKILL)
    sys.exit(0)

class Dying(torch.autograd.Function):
    @staticmethod
    def forward(context, x):
        return x.clone()
    @staticmethod
    def backward(context, gradient):
        if world.rank == 1:
            die()
        return gradient

with paceline.init(backend) as world:
    if place == "backward":
        model = paceline.DistributedDataParallel(torch.nn.Linear(4, 4))
        model(Dying.apply(torch.ones(1, 4, requires_grad=True))).sum().backward()
    for step in range(3):
        if world.rank == 1 and step == 1:
            die()
        dist.all_reduce(torch.ones(8))
"""
DEATHS = {
    ("paceline", "collective", "abort"): "rank 1 failed first (signal SIGABRT)",
    ("gloo", "collective", "exit"): "rank 1 ended with exit code 0 while the others still needed it, so rank ",
    ("gloo", "backward", "kill"): "rank 1 failed first (signal SIGKILL, which the kernel sends when memory runs out)",
}


@pytest.mark.slow
@pytest.mark.parametrize(("case", "headline"), DEATHS.items(), ids=map("-".join, DEATHS))
def test_dead_rank_named_last_with_at_most_one_traceback(
    case: tuple[str, str, str], headline: str, tmp_path: Path
) -> None:
    ending = {REAL_END: "1"} if case[2] == "exit" else {}
    arguments = ("--nproc", "3", "--timeout", "60", script(tmp_path, DYING), *case)
    done = paceline(tmp_path, "run", *arguments, fork="all", **ending)
    lines = done.stderr.splitlines()
    assert done.returncode == 1
    assert lines[-1].startswith(f"error: {headline}"), done.stderr
    blocks = {line.split()[1] for line in lines if " | " in line}
    # On a busy machine a failed rank may need seconds to exit. Its traceback then appears early, and only once.
    late = set(re.findall(r"^rank (\d) raised this .* and is still running$", done.stderr, re.MULTILINE))
    assert len(blocks - late) <= 1, done.stderr
    assert not re.search(r"^\[rank\d\]:|SIGTERM|^Traceback", done.stderr, re.MULTILINE), done.stderr


def test_errors_raised_while_the_job_stops_are_shown(tmp_path: Path) -> None:
    # Ranks leave their errors to the launcher, which has no failure to report here.
    name = script(
        tmp_path,
        "import signal, time\n"
        "def fail(*_): raise OSError('no room for the last checkpoint')\n"
        "signal.signal(signal.SIGTERM, fail)\n"
        "open('ready', 'w').close()\n"
        "time.sleep(60)\n",
    )
    with Running(tmp_path, "run", name) as job:
        job.wait_for("ready")
        job.process.send_signal(signal.SIGTERM)
        assert job.wait() == 143
        assert "  rank 0 | OSError: no room for the last checkpoint\nterminated by SIGTERM\n" in job.stderr


def test_traceback_shown_while_the_failed_rank_lingers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    # A running thread kept the process alive, and the launcher withheld the error until it ended.
    monkeypatch.setattr(rank_processes, "SLOW_S", 0.2)
    name = script(
        tmp_path,
        "import threading, time\nthreading.Thread(target=time.sleep, args=(1,)).start()\nraise OSError('no data')\n",
    )
    assert launch(Job([sys.executable, str(tmp_path / name)], 1)) == 1
    shown = capfd.readouterr().err.splitlines()
    at = shown.index("rank 0 raised this 0 s ago and is still running")
    assert shown[at - 1] == "  rank 0 | OSError: no data"
    assert shown[-1] == "error: rank 0 failed first (exit code 1: OSError: no data)"
