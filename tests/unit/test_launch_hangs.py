"""A rank that makes no progress is named with its stacks and what the others wait in, and the job goes on."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from paceline.black_box import Snapshot
from paceline.launch.hangs import Sight, hanging, waiting_call
from processes import Running, paceline, script

TRAIN = """
import hashlib, os, signal, sys, time, torch, paceline
how = sys.argv[1]
world = paceline.init()
torch.manual_seed(3)

class Net(torch.nn.Linear):
    def forward(self, x):
        if strikes: hang()
        return super().forward(x)

def hang():
    open("ready", "w").write(str(os.getpid()))
    if how == "spin":
        while True: pass
    if how == "sleep": time.sleep(600)
    if how == "system-call": os.read(os.pipe()[0], 1)
    if how == "stop": os.kill(os.getpid(), signal.SIGSTOP)

strikes = False
model = paceline.DistributedDataParallel(Net(4, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
checkpointer = paceline.Checkpointer("saved")
checkpointer.register("model", model)
checkpointer.register("optimizer", optimizer)
first = checkpointer.restore() if checkpointer.steps() else 0
checkpointer.step()
for step in range(first, 6):
    strikes = step == 3 and world.rank == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and how != "no"
    model(torch.randn(2, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    checkpointer.step()
checkpointer.close()
digest = hashlib.sha256()
for value in model.parameters(): digest.update(value.detach().numpy().tobytes())
open(f"digest-{world.rank}", "w").write(digest.hexdigest())
"""


def digests(folder: Path) -> set[str]:
    return {(folder / f"digest-{rank}").read_text() for rank in range(2)}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    folder = tmp_path_factory.mktemp("undisturbed")
    assert paceline(folder, "run", "--nproc", "2", script(folder, TRAIN), "no", fork="all").returncode == 0
    return digests(folder)


@pytest.mark.parametrize("how", ["spin", "sleep", "system-call", "stop"])
def test_a_rank_that_hangs_is_named_with_its_stacks_and_the_job_ends_as_if_undisturbed(
    tmp_path: Path, undisturbed: set[str], how: str
) -> None:
    options = ("--nproc", "2", "--hang-timeout", "1", "--report", "report.json")
    done = paceline(tmp_path, "run", *options, script(tmp_path, TRAIN), how, fork="all")
    assert done.returncode == 0, done.stderr
    assert digests(tmp_path) == undisturbed
    said = done.stderr.splitlines()
    assert any("rank 1 | " in line and "in hang" in line for line in said), done.stderr
    assert "rank 0: waiting for gradients in step 4" in done.stderr
    what = "stopped for 1 s, by SIGSTOP" if how == "stop" else "no progress for 1 s, in step 4, forward"
    assert f"rank 1 hangs: {what}" in done.stderr
    assert "in memory (restart 1" in said[-1]
    (failure,) = json.loads((tmp_path / "report.json").read_text())["failures"]
    first = failure["first"]
    assert (first["rank"], first["kind"], first["signal"], first["step"]) == (1, "hang", None, 4)
    assert "in hang" in first["stacks"]
    assert [rank["kind"] for rank in failure["others"]] == ["consequence"]
    assert "in wait" in failure["others"][0]["stacks"]


def test_a_rank_that_is_stopped_for_half_the_timeout_raises_no_alarm(tmp_path: Path, undisturbed: set[str]) -> None:
    arguments = ("--hang-timeout", "3", script(tmp_path, TRAIN), "stop")
    with Running(tmp_path, "run", "--nproc", "2", *arguments, fork="all") as job:
        job.wait_for("ready")
        time.sleep(1.5)
        os.kill(int((tmp_path / "ready").read_text()), signal.SIGCONT)
        assert job.wait() == 0
        assert job.stderr == ""
    assert digests(tmp_path) == undisturbed


@pytest.mark.slow
def test_a_launcher_that_was_stopped_with_its_ranks_raises_no_alarm(tmp_path: Path) -> None:
    # On its return everything looks as if it had been still for long.
    arguments = ("--hang-timeout", "1.5", script(tmp_path, TRAIN), "stop")
    with Running(tmp_path, "run", "--nproc", "2", *arguments, fork="all") as job:
        job.wait_for("ready")
        job.process.send_signal(signal.SIGSTOP)
        time.sleep(3)
        os.kill(int((tmp_path / "ready").read_text()), signal.SIGCONT)
        job.process.send_signal(signal.SIGCONT)
        assert job.wait() == 0
        assert job.stderr == ""


def test_a_hang_that_is_only_to_be_reported_is_told_once_and_the_job_goes_on(tmp_path: Path) -> None:
    arguments = ("--hang-timeout", "0.5", "--hang-action", "report", script(tmp_path, TRAIN), "stop")
    with Running(tmp_path, "run", "--nproc", "2", *arguments, fork="all") as job:
        job.wait_for("ready")
        time.sleep(2)
        os.kill(int((tmp_path / "ready").read_text()), signal.SIGCONT)
        assert job.wait() == 0
        assert job.stderr.count("rank 1 hangs: stopped for 1 s") == 1, job.stderr


@pytest.mark.slow
def test_without_a_flag_the_rank_that_kept_others_waiting_tells_its_stacks_at_their_timeout(tmp_path: Path) -> None:
    done = paceline(tmp_path, "run", "--nproc", "2", "--timeout", "1.5", script(tmp_path, TRAIN), "spin", fork="all")
    assert done.returncode == 0, done.stderr
    assert "rank 1 kept the others waiting" in done.stderr
    assert any("rank 1 | " in line and "in hang" in line for line in done.stderr.splitlines()), done.stderr


def test_a_script_without_phases_raises_no_alarm_by_being_slow(tmp_path: Path) -> None:
    slow = script(tmp_path, "import time\ntime.sleep(1.5)\n")
    done = paceline(tmp_path, "run", "--nproc", "2", "--hang-timeout", "0.3", slow, fork="all")
    assert (done.returncode, done.stderr) == (0, "")


def sight(rank: int, phase: str | None, still: float, stopped: float = 0.0, steps: int = 3) -> Sight:
    fields: dict[str, Any] = {"pid": 1, "rank": rank, "size": 2, "host": "", "since": 0.0, "bucket": None}
    times = dict.fromkeys(("stepped", "step", "mean_step", "waited", "mean_waited", "waited_spread"), 0.0)
    box = None if phase is None else Snapshot(**fields, phase=phase, steps=steps, **times)
    return Sight(rank, box, "T" if stopped else "S", still, stopped)


@pytest.mark.parametrize(
    ("sights", "expected"),
    [
        ([sight(0, "bucket wait", 11), sight(1, "forward", 12)], (1,)),
        ([sight(0, "bucket wait", 8), sight(1, "forward", 9)], ()),
        ([sight(0, "bucket wait", 11), sight(1, "forward", 1)], ()),
        ([sight(0, "bucket wait", 11), sight(1, "loop", 12)], (1,)),
        ([sight(0, "loop", 50), sight(1, "loop", 50)], ()),
        ([sight(0, "loop", 150), sight(1, "loop", 150)], (0, 1)),
        ([sight(0, "collective", 50), sight(1, "checkpoint", 50)], ()),
        ([sight(0, "collective", 150), sight(1, "checkpoint", 150)], (1,)),
        ([sight(0, "bucket wait", 50, steps=0), sight(1, "forward", 50, steps=0)], ()),
        ([sight(0, "bucket wait", 11), sight(1, "wait", 12, stopped=12)], (1,)),
        ([sight(0, "bucket wait", 11), sight(1, "collective", 12)], (0, 1)),
        ([sight(0, None, 900), sight(1, None, 900)], ()),
        ([sight(0, None, 900), sight(1, None, 900, stopped=11)], (1,)),
    ],
)
def test_the_rank_that_hangs_is_the_one_the_others_wait_for(sights: list[Sight], expected: tuple[int, ...]) -> None:
    assert hanging(sights, 10) == expected


def test_the_call_a_rank_waits_in_is_the_outermost_one_of_torch_distributed() -> None:
    told = """Thread 0x01 (most recent call first):
  File "/x/threading.py", line 1 in wait

Current thread 0x02 (most recent call first):
  File "/x/torch/distributed/distributed_c10d.py", line 3 in all_reduce
  File "/x/torch/distributed/c10d_logger.py", line 2 in wrapper
  File "train.py", line 4 in <module>
"""
    assert waiting_call(told) == "all_reduce"
    assert waiting_call(told.replace("/x/torch/distributed/distributed_c10d", "mine")) == ""
