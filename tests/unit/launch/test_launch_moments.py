"""Failure reports give the step and phase of the first failed rank and what the others did; `--report` writes them."""

from __future__ import annotations

import json
import re
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from insides import Job, JobReport, agent
from paceline.errors import UsageError
from processes import Running, paceline, script

TRAIN = """
import os, signal, sys, time, torch, paceline
from pathlib import Path
from paceline.core.black_box import WAITING, path_of, read_box
# Where which ranks of which attempt strike: "backward:kill:1:0" is rank 1 of the first one.
strikes = [strike.split(":") for strike in sys.argv[1:]]
attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
world = paceline.init()

def waits(rank):
    box = read_box(path_of(Path(os.environ["PACELINE_BLACK_BOX"]), rank))
    return box is not None and box.steps == 2 and box.phase in WAITING

def at(place, step=2):
    struck = {int(rank) for where, _, rank, life in strikes if (where, life) == (place, attempt)}
    for where, how, rank, life in strikes:
        if (where, int(rank), life) == (place, world.rank, attempt) and step == 2:
            open(f"{place}-{attempt}-{rank}", "w").close()
            while not all(os.path.exists(f"{place}-{attempt}-{other}") for other in struck): pass
            while place != "start" and not all(waits(other) for other in set(range(world.size)) - struck): pass
            time.sleep(0.15)
            if how == "raise": raise ValueError("boom")
            if how == "kill": os.kill(os.getpid(), signal.SIGKILL)
            os._exit(3)

class Net(torch.nn.Linear):
    def forward(self, x):
        at("forward", step)
        out = super().forward(x)
        out.register_hook(lambda gradient: at("backward", step))
        return out.clone()

at("start")
model = paceline.DistributedDataParallel(Net(4, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(4):
    model(torch.ones(2, 4)).sum().backward()
    at("loop", step)
    optimizer.step()
    optimizer.zero_grad()
"""


def struck(folder: Path, *strikes: str, nproc: int = 2, restarts: int = 0) -> tuple[int, list[str], dict[str, Any]]:
    """Run the script; return the exit code, the launcher's lines about failures, and the report."""
    name = script(folder, TRAIN)
    options = ("--nproc", str(nproc), "--max-restarts", str(restarts), "--report", "report.json")
    done = paceline(folder, "run", *options, name, *strikes, fork="all")
    said = [line for line in done.stderr.splitlines() if " | " not in line and not line.startswith("note:")]
    return done.returncode, said, json.loads((folder / "report.json").read_text())


def test_killed_rank_reports_its_phase_which_a_restart_does_not_inherit(tmp_path: Path) -> None:
    # The second start fails before its first step, so stale boxes would still describe the first start.
    code, said, report = struck(tmp_path, "backward:kill:1:0", "start:raise:1:1", nproc=3, restarts=1)
    assert code == 1
    assert "ranks 0, 2: waiting for gradients in step 3" in said
    killed = r"rank 1 failed first \(signal SIGKILL, [^)]* memory runs out\) \d+(\.\d+)? m?s into backward of step 3"
    assert any(re.match(killed, line) for line in said), said
    # On a busy machine the launcher may end the rank while it exits; the exit code is then missing.
    assert said[-1].replace("exit code 1: ", "") == "error: rank 1 failed first (ValueError: boom)"
    assert (report["ok"], report["exit_code"], report["restarts"]) == (False, 1, 1)
    first, second = report["failures"]
    assert (first["attempt"], second["attempt"]) == (0, 1)
    expected = {"rank": 1, "kind": "signal", "signal": "SIGKILL", "exception": None}
    assert expected.items() <= first["first"].items()
    assert (first["first"]["step"], first["first"]["phase"]) == (3, "backward")
    assert first["first"]["phase_seconds"] >= 0.1
    assert [other["step"] for other in first["others"]] == [3, 3]
    assert {other["phase"] for other in first["others"]} <= {"wait", "bucket wait"}
    assert second["first"]["exception"] == {"type": "ValueError", "message": "boom"}
    assert [rank["step"] for rank in (second["first"], *second["others"])] == [None] * 3


@pytest.mark.slow
def test_exception_reports_its_phase_and_a_recovered_job_is_ok(tmp_path: Path) -> None:
    # The exception leaves the phase before it is recorded, when the box already says "the script's own code".
    code, said, report = struck(tmp_path, "forward:raise:1:0", restarts=1)
    assert code == 0
    assert "rank 0: waiting for gradients in step 3" in said
    assert re.search(r"\(ValueError: boom\) \d.* into forward of step 3", said[-1].replace("exit code 1: ", ""))
    assert (report["ok"], report["exit_code"], report["restarts"]) == (True, 0, 1)
    (failure,) = report["failures"]
    assert (failure["first"]["kind"], failure["first"]["phase"]) == ("exception", "forward")
    assert 'raise ValueError("boom")' in failure["first"]["traceback"]
    assert failure["summary"] in said[-1]


def test_two_simultaneous_failures_both_report_their_phase(tmp_path: Path) -> None:
    code, said, report = struck(tmp_path, "loop:exit:0:0", "loop:exit:1:0")
    assert code == 1
    first = report["failures"][0]["first"]["rank"]
    assert re.match(
        rf"error: rank {first} failed first \(exit code 3\) \d.* into the script's own code of step 3", said[-1]
    )
    assert said[:2] == [
        f"rank {1 - first}: in the script's own code of step 3",
        f"rank {1 - first} also failed (exit code 3)",
    ]
    ranks = [report["failures"][0]["first"], *report["failures"][0]["others"]]
    assert [(rank["kind"], rank["exit_code"], rank["step"], rank["phase"]) for rank in ranks] == [
        ("exit code", 3, 3, "loop")
    ] * 2


LOADING = """
import torch, paceline
from paceline.data import DataLoader

class Samples(torch.utils.data.TensorDataset):
    def __getitem__(self, index):
        if index == 20: raise OSError("damaged")
        return super().__getitem__(index)[0]

world = paceline.init()
model = paceline.DistributedDataParallel(torch.nn.Linear(4, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for batch in DataLoader(Samples(torch.ones(32, 4)), 8):
    model(batch).sum().backward()
    optimizer.step()
"""


def test_unloadable_sample_fails_in_the_data_phase(tmp_path: Path) -> None:
    # The loader raises the error after the wait for the batch has ended.
    done = paceline(tmp_path, "run", script(tmp_path, LOADING), fork="all")
    assert " into the data wait of step 3" in done.stderr.splitlines()[-1]


def test_running_and_interrupted_jobs_are_not_ok(tmp_path: Path) -> None:
    name = script(tmp_path, "import time; open('ready', 'w').close(); time.sleep(60)")
    with Running(tmp_path, "run", "--report", "report.json", name, fork="all") as running_job:
        running_job.wait_for("ready")
        running = {
            "ok": None,
            "exit_code": None,
            "restarts": 0,
            "steps_redone": 0,
            "rescued_from": None,
            "changes": [],
            "failures": [],
        }
        assert json.loads((tmp_path / "report.json").read_text()) == running
        running_job.process.send_signal(signal.SIGTERM)
        assert running_job.wait() == 143
    assert json.loads((tmp_path / "report.json").read_text()) == running | {"ok": False, "exit_code": 143}


@pytest.mark.parametrize(
    ("file", "error"),
    [
        ("no/report.json", "--report no/report.json: the folder "),
        (".", "--report . cannot be written: it is a folder"),
        ("/dev/full", "--report /dev/full cannot be written: No space left"),
    ],
)
def test_unwritable_report_is_refused_before_the_start(monkeypatch: pytest.MonkeyPatch, file: str, error: str) -> None:
    monkeypatch.setattr(agent, "run", lambda *_: pytest.fail("started"))
    with pytest.raises(UsageError, match=f"^{error}"):
        agent.launch(Job(["true"], 1, report=file))


def test_report_of_a_refused_job_states_the_refusal(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PACELINE_PRELOAD", "2")
    with pytest.raises(UsageError, match="PACELINE_PRELOAD"):
        agent.launch(Job(["true"], 1, report=str(tmp_path / "report.json")))
    report = json.loads((tmp_path / "report.json").read_text())
    assert (report["ok"], report["exit_code"]) == (False, 2)


def test_report_that_became_unwritable_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    said: list[str] = []
    report = JobReport(str(tmp_path / "folder" / "report.json"), said.append)
    shutil.rmtree(tmp_path / "folder")
    assert report.end(0) == 2
    assert report.end(7) == 7
    why = "cannot be written: No such file or directory; choose another file"
    assert said == [f"error: --report {tmp_path}/folder/report.json {why}"] * 2
