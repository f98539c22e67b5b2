"""``paceline top``: the ranks of a running job as seen in their black boxes."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from insides import (
    ENDED,
    PARENT,
    RUNNING,
    STARTING,
    JobNote,
    RankStatus,
    choose,
    describe,
    find_straggler,
    module_command,
    title_of,
)
from paceline.errors import UsageError
from processes import Running, paceline, script, until

SLEEP_S = 0.1
TRAIN = f"""
import os, time, torch, paceline
from pathlib import Path
from paceline.core.black_box import WAITING, path_of, read_box
world = paceline.init("gloo")

def waits(rank, step):
    box = read_box(path_of(Path(os.environ["PACELINE_BLACK_BOX"]), rank))
    return box is not None and box.steps == step and box.phase in WAITING

model = paceline.DistributedDataParallel(torch.nn.Linear(8, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(100_000):
    if world.rank == 1:  # slow, whatever else the machine does: rank 0 waits from then on
        while step > 0 and not waits(0, step): time.sleep(0.001)
        time.sleep({SLEEP_S})
    model(torch.ones(4, 8)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    if step == 12:
        open(f"ready-{{world.rank}}", "w").close()
"""
IDLE = "import os, time; open('ready-' + os.environ['RANK'], 'w').close(); time.sleep(600)\n"


@pytest.fixture(autouse=True)
def parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A separate parent folder for the jobs of a test; empty once they have ended."""
    monkeypatch.setenv(PARENT, str(tmp_path))
    yield tmp_path
    assert not list(tmp_path.glob("paceline-job-*"))


def top(folder: Path, *options: str) -> tuple[int, str, str]:
    """Run the command in `folder`; return exit code, stdout and stderr."""
    (folder / "top").mkdir(exist_ok=True)
    done = paceline(folder / "top", "top", *options)
    return done.returncode, done.stdout, done.stderr


# -- real jobs ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_running_job_is_shown_with_its_slow_and_its_dead_rank(tmp_path: Path) -> None:
    with Running(tmp_path, "run", "--nproc", "2", script(tmp_path, TRAIN), fork="all") as job:
        job.wait_for("ready-0", "ready-1")
        code, out, err = top(tmp_path, "--json")
        assert (code, err) == (0, "")
        seen = json.loads(out)
        assert (seen["job"]["pid"], seen["job"]["title"], seen["job"]["nproc"]) == (job.process.pid, "script.py", 2)
        ranks = seen["ranks"]
        assert [rank["rank"] for rank in ranks] == [0, 1]
        assert all(rank["state"] == "running" and rank["step"] > 12 for rank in ranks)
        waits = [rank["waiting_seconds"] for rank in ranks]
        assert ranks[0]["step_seconds"] >= waits[0] >= SLEEP_S
        assert (seen["straggler"]["rank"], seen["straggler"]["kind"]) == (1, "slow")
        assert seen["straggler"]["seconds"] == pytest.approx(waits[0] - waits[1])

        code, out, err = top(tmp_path, "--job", str(ranks[1]["pid"]))
        assert (code, err) == (0, "")
        assert f"job {job.process.pid}: script.py, 2 ranks" in out
        assert "rank 1 is slow: the others wait" in out

        paused = job.process.pid, ranks[0]["pid"]  # otherwise the launcher would end the job, or rank 0 itself
        for pid in paused:
            os.kill(pid, signal.SIGSTOP)
        os.kill(ranks[1]["pid"], signal.SIGKILL)
        until(lambda: json.loads(top(tmp_path, "--json")[1])["ranks"][1]["state"] != "running")
        rank = json.loads(top(tmp_path, "--json")[1])["ranks"][1]
        assert (rank["state"], rank["phase_seconds"]) == ("ended", None)
        assert rank["step"] > 12, "the last activity is still shown"
        assert "rank 1 has ended" in top(tmp_path)[1]
        for pid in paused:
            os.kill(pid, signal.SIGCONT)
        assert job.wait() == 1
    assert "rank 1" in job.stderr


@pytest.mark.slow
def test_several_jobs_need_a_choice_and_no_job_is_reported(tmp_path: Path) -> None:
    no_job = "error: you have no running job on this host; start one with paceline run, train or profile"
    assert top(tmp_path) == (2, "", f"{no_job}\n")
    folders = [tmp_path / "one", tmp_path / "two"]
    for folder in folders:
        folder.mkdir()
    name = script(folders[0], IDLE), script(folders[1], IDLE)
    with Running(folders[0], "run", name[0]) as one, Running(folders[1], "run", "--nproc", "2", name[1], "-v") as two:
        one.wait_for("ready-0")
        two.wait_for("ready-0", "ready-1")
        code, out, err = top(tmp_path)
        assert (code, out) == (2, "")
        assert err.startswith("2 jobs are running on this host; choose one with --job PID\n")
        listed = [f"  {one.process.pid}  script.py, 1 rank, in {folders[0]}"]
        listed += [f"  {two.process.pid}  script.py -v, 2 ranks, in {folders[1]}"]
        assert sorted(err.splitlines()[1:]) == sorted(listed)  # they start at the same time
        here = paceline(folders[1], "top", "--json")
        assert json.loads(here.stdout)["job"]["pid"] == two.process.pid, "the job of the current folder"
        seen = json.loads(top(tmp_path, "--json", "--job", str(two.process.pid))[1])
        assert [rank["state"] for rank in seen["ranks"]] == ["starting"] * 2, "they never train"
        assert "waiting for the first forward" in top(tmp_path, "--job", str(one.process.pid))[1]
        code, _, err = top(tmp_path, "--job", "1")
        assert (code, "error: --job 1 is not a process of a running job; choose one of:" in err) == (2, True)
        for job in (one, two):
            job.process.send_signal(signal.SIGTERM)
            job.wait()
    assert top(tmp_path)[0] == 2


# -- titles and choices ------------------------------------------------------------------------------------------------


def test_job_of_this_folder_is_the_default_unless_ambiguous(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    here, other = str(tmp_path), str(tmp_path / "elsewhere")
    jobs = {Path(str(pid)): JobNote(pid, "", "train.py", 2, 0.0, folder) for pid, folder in ((1, here), (2, other))}
    assert choose(jobs, None)[0][1].pid == 1
    assert choose(jobs, 2)[0][1].pid == 2
    jobs[Path("3")] = JobNote(3, "", "train.py", 2, 0.0, here)
    assert len(choose(jobs, None)) == 3
    with pytest.raises(UsageError, match="--job 4 is not a process of a running job"):
        choose(jobs, 4)


def test_job_title_is_the_typed_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """The title of a recipe was 20 lines of JSON."""
    monkeypatch.setitem(sys.modules, "paceline_command", sys)
    monkeypatch.setattr(sys, "argv", ["/usr/bin/paceline", "train", "mrpc", "--epochs", "2"])
    ranks = module_command("paceline.tools", "recipes.mrpc", '{\n "epochs": 2\n}')
    assert title_of(ranks) == "paceline train mrpc --epochs 2"
    assert title_of([sys.executable, "-u", "train.py", "--lr", "0.1"]) == "train.py --lr 0.1"
    code = title_of([sys.executable, "-c", "import torch\n" * 100])
    assert "\n" not in code
    assert len(code) <= 200


# -- stragglers --------------------------------------------------------------------------------------------------------


def status(rank: int, waiting: float, **changes: Any) -> RankStatus:
    """Return a rank with 100 ms steps, waiting `waiting` ms of each."""
    usual = RankStatus(rank, RUNNING, 10 + rank, "host", 50, "forward", None, 0.01, 0.1, 0.1, waiting / 1e3, 0.001, 50)
    return replace(usual, **changes)


@pytest.mark.parametrize(
    ("waiting", "slow"),
    [
        ([40, 2], 1),
        ([40, 41, 2, 39], 2),
        ([6, 5], None),
        ([8, 0], None),
        ([0, 0, 0], None),
        ([40, 3, 2, 39], 2),
        ([2, 3, 2, 50], None),  # most are slow
        ([7], None),
    ],
)
def test_least_waiting_rank_is_slow_if_others_wait_clearly_longer(waiting: list[float], slow: int | None) -> None:
    straggler = find_straggler([status(rank, milliseconds) for rank, milliseconds in enumerate(waiting)])
    assert (None if straggler is None else straggler.rank) == slow


def test_fluctuating_waits_need_a_larger_difference() -> None:
    even, uneven = ([status(0, 25), status(1, 5)] for _ in range(2))
    uneven = [replace(rank, waiting_spread=0.03) for rank in uneven]
    assert find_straggler(even) is not None
    assert find_straggler(uneven) is None


@pytest.mark.parametrize("changes", [{"timed": 3}, {"waiting_seconds": None}, {"state": STARTING}, {"state": ENDED}])
def test_no_straggler_before_all_ranks_have_stepped(changes: dict[str, Any]) -> None:
    assert find_straggler([status(0, 40), status(1, 2, **changes)]) is None


def test_rank_that_currently_blocks_all_others_is_stuck() -> None:
    waits = [status(rank, 5, phase=phase, phase_seconds=8.0) for rank, phase in enumerate(("wait", "bucket wait"))]
    stuck = status(2, 5, phase="data wait", phase_seconds=8.1)
    assert str(find_straggler([*waits, stuck])) == "rank 2 has kept the others waiting for 8.0 s"
    assert find_straggler([*waits, replace(stuck, phase="wait")]) is None, "the network may be slow"
    assert find_straggler([waits[0], stuck, replace(stuck, rank=1)]) is None, "two stuck ranks"
    assert find_straggler([replace(rank, step_seconds=4.0) for rank in (*waits, stuck)]) is None, "long steps"
    assert describe([*waits, replace(stuck, state=ENDED)]) == "rank 2 has ended"
