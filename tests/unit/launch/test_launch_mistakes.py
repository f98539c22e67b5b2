"""A user error produces one line or one traceback, and is not retried."""

from __future__ import annotations

import os
import re
import resource
from pathlib import Path

import pytest

from insides import Job, agent
from loops import loop
from paceline.errors import UsageError
from processes import paceline, run_here, script

LOOP = loop(
    6,
    begin="""
from paceline.errors import UsageError
if world.rank == 1 and start == 0:
    os.kill(os.getpid(), 9)
""",
    before="""
if world.rank == 1 and start == 1:
    raise OSError("the address is in use")
if step == 3:
    raise UsageError("lr=7 is not a thing; give another")
""",
)


@pytest.mark.parametrize(
    ("limit", "value", "message"),
    [
        # This was a traceback from inside process startup.
        (resource.RLIMIT_NOFILE, 20,
         "the limit on open files is 20, and 2 ranks need about 44; raise it: ulimit -n 1024"),
        # The ranks waited forever for the lock of their file store.
        (resource.RLIMIT_FSIZE, 1024,
         "the limit on the size of a file is 1,024 bytes, and the ranks write files of up to 1,048,576; raise it: "
         "ulimit -f unlimited"),
    ],
)  # fmt: skip
def test_low_limit_is_one_line(monkeypatch: pytest.MonkeyPatch, limit: int, value: int, message: str) -> None:
    limits = {kind: resource.getrlimit(kind) for kind in (resource.RLIMIT_NOFILE, resource.RLIMIT_FSIZE)}
    monkeypatch.setattr(resource, "getrlimit", (limits | {limit: (value, value)}).__getitem__)
    monkeypatch.setattr(agent, "run", lambda *_: pytest.fail("started"))
    with pytest.raises(UsageError, match=f"^{re.escape(message)}$"):
        agent.launch(Job(["true"], 2))


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (BlockingIOError(11, "Resource temporarily unavailable"), "no process or thread can be started; raise "),
        (RuntimeError("can't start new thread"), "no process or thread can be started; raise "),
        (OSError(24, "Too many open files"), "the limit on open files, "),
        (FileNotFoundError(2, "No usable temporary directory found in ['/tmp']"), "no temporary folder can be "),
    ],
)
def test_limit_hit_during_startup_is_reported_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path, error: Exception, message: str
) -> None:
    def fail(*_: object, **__: object) -> None:
        try:
            raise error
        finally:
            os.kill(2**22, 0)  # like torchelastic, which then fails to end a rank

    monkeypatch.setattr(agent, "start_processes", fail)
    monkeypatch.setenv("PACELINE_PRELOAD", "0")
    report, name = tmp_path / "report", script(tmp_path, "")
    assert run_here(monkeypatch, "run", "--nproc", "1", "--report", str(report), str(tmp_path / name)) == 1
    [line] = capfd.readouterr().err.splitlines()
    assert line.startswith(f"error: {message}")
    assert '"exit_code": 1' in report.read_text()


def test_user_errors_end_the_job_and_early_kills_do_not(tmp_path: Path) -> None:
    done = paceline(tmp_path, "run", "--nproc", "2", script(tmp_path, LOOP), fork="all")
    assert done.returncode == 2, done.stderr
    assert done.stderr.count("restarting all ranks") == 2
    assert "rank 1 failed first (signal SIGKILL" in done.stderr
    assert "rank 1 failed first (exit code 1: OSError: the address is in use)" in done.stderr
    assert done.stderr.count("Traceback") == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith("error: lr=7 is not a thing; give another (")
    assert "script.py, line " in last


PLAIN = """
import os, sys, torch, torch.distributed as dist
dist.init_process_group("gloo")
if sys.argv[1] == "without data":
    raise KeyError("labels")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(6):
    if step == 3 and dist.get_rank() == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        raise ValueError("the labels are wrong")
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.parametrize(("when", "code", "starts"), [("without data", 2, 1), ("in step 4", 0, 2)])
def test_script_with_uncounted_steps_restarts_once_it_has_an_optimizer(
    tmp_path: Path, when: str, code: int, starts: int
) -> None:
    done = paceline(tmp_path, "run", "--nproc", "2", "--max-restarts", "2", script(tmp_path, PLAIN), when, fork="all")
    assert done.returncode == code, done.stderr
    assert done.stderr.count("restarting all ranks") == starts - 1
    mistake = "before the first step is the script's fault: the ranks are not restarted"
    assert (mistake in done.stderr) is (starts == 1)
