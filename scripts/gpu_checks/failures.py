"""Ranks that fail, hang or are asked to end beside a GPU, in jobs of ``paceline run``."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpu_checks.bits import told
from gpu_checks.rows import Place, Row, holds, measured
from paceline.core.telemetry.flight_record import is_running

STEPS, FAILS_IN = 24, 13
"""Steps of a job, and the one in which a rank goes wrong; a checkpoint is written every 5."""
JOB_SECONDS = 75.0
"""A job is ended after so long."""
SCRIPT = """
import os, signal, sys, time
from pathlib import Path
import torch, torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset
import paceline
from paceline.core.state.digests import weights_sha256
from paceline.data import DataLoader

device, mode, steps, fails_in = torch.device(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
if device.type == "cuda":
    torch.cuda.set_device(device)  # both ranks share it
    torch.use_deterministic_algorithms(True, warn_only=True)
else:
    torch.set_num_threads(1)
world = paceline.init("gloo")
Path(f"pid-{os.getpid()}").touch()
with paceline.set_seed(0):
    net = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Dropout(0.1), nn.Linear(256, 4)).to(device)
    data = TensorDataset(torch.randn(256, 64), torch.randint(4, (256,)))
checkpointer = paceline.Checkpointer("points", every=5)
model = checkpointer.register("model", paceline.DistributedDataParallel(net))
optimizer = checkpointer.register("optimizer", torch.optim.AdamW(model.parameters(), lr=0.01))
loader = checkpointer.register("loader", DataLoader(data, batch_size=64, shuffle=True))
step = checkpointer.restore() if checkpointer.steps() else 0


def go_wrong():
    marker = Path("has-gone-wrong")
    if mode == "none" or world.rank != 1 or step + 1 != fails_in or marker.exists():
        return
    marker.touch()
    if mode == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif mode == "kernel":
        if device.type == "cuda":
            for _ in range(20):  # some 3 seconds each
                torch.cuda._sleep(5 * 10**9)
            torch.cuda.synchronize()
        time.sleep(1000)


while step < steps:
    for x, y in loader:
        x, y = x.to(device), y.to(device)
        with model.weight(len(y)):
            hidden = model(x)
            go_wrong()
            F.cross_entropy(hidden, y, reduction="sum").backward()
        optimizer.step()
        optimizer.zero_grad()
        checkpointer.step()
        step += 1
        if mode == "slow":
            Path("has-begun").touch()
            time.sleep(0.2)
        if step == steps:
            break
checkpointer.close()
if world.rank == 0:
    Path("weights").write_text(weights_sha256(net))
world.close()
"""


@dataclass
class Job:
    """A run of a script by the launcher, in a folder of its own."""

    process: subprocess.Popen[str]
    folder: Path
    began: float

    def wait(self) -> int:
        """Return the exit code; a job that takes too long is killed."""
        try:
            return self.process.wait(max(0.1, self.began + JOB_SECONDS - time.monotonic()))
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            return -1

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began

    def text(self) -> str:
        return (self.folder / "stderr").read_text("utf-8", "replace")

    def last_line(self) -> str:
        return next(reversed(self.text().strip().splitlines()), "")

    def report(self) -> dict[str, Any]:
        file = self.folder / "report.json"
        return dict(json.loads(file.read_text("utf-8"))) if file.exists() else {}

    def weights(self) -> str:
        file = self.folder / "weights"
        return file.read_text("utf-8") if file.exists() else "none"

    def left(self) -> list[int]:
        """Ranks that are still there a while after the job's end."""
        pids = [int(file.name.removeprefix("pid-")) for file in self.folder.glob("pid-*")]
        deadline = time.monotonic() + 5
        while (alive := [pid for pid in pids if is_running(pid)]) and time.monotonic() < deadline:
            time.sleep(0.1)
        return alive


@contextmanager
def folders(count: int) -> Iterator[list[Path]]:
    with tempfile.TemporaryDirectory() as folder:
        made = [Path(folder, str(number)) for number in range(count)]
        for each in made:
            each.mkdir()
        yield made


def start(folder: Path, command: list[str], script: str, arguments: list[str]) -> Job:
    """Start ``paceline`` with a `command`, a script and its arguments."""
    (folder / "train.py").write_text(script, "utf-8")
    paths = os.pathsep.join([str(Path(__file__).resolve().parents[2] / "src"), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": paths.rstrip(os.pathsep), "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    program = [sys.executable, "-m", "paceline", *command, "train.py", *arguments]
    with open(folder / "stdout", "w") as out, open(folder / "stderr", "w") as errors:
        process = subprocess.Popen(program, cwd=folder, env=environment, stdout=out, stderr=errors, text=True)
    return Job(process, folder, time.monotonic())


def train(place: Place, folder: Path, mode: str, options: tuple[str, ...] = ()) -> Job:
    """Start a job of two ranks on one device, in which rank 1 goes wrong as `mode` says."""
    command = ["run", "--nproc", "2", "--report", "report.json", *options]
    return start(folder, command, SCRIPT, [str(place.device), mode, str(STEPS), str(FAILS_IN)])


def goes_on(place: Place, mode: str, what: str, options: tuple[str, ...] = ()) -> Iterator[Row]:
    """A job whose rank 1 goes wrong in mid-step goes on, and ends with the weights of one that nothing disturbed."""
    with folders(2) as (first, second):
        calm = train(place, first, "none")
        if not place.on_gpu:  # where cores are few, one after the other
            calm.wait()
        job = train(place, second, mode, options)
        codes = [job.wait(), calm.wait()]
        took, report = job.seconds, job.report()
        right = codes == [0, 0] and report.get("restarts") == 1
        yield holds(f"{what}: the job goes on", f"exit codes {codes}, {job.last_line()}" if not right else "", right)
        bits, expected = job.weights(), calm.weights()
        yield holds("SHA-256 as of an undisturbed job", told(bits, expected), bits == expected != "none")
        failure = (report.get("failures") or [{}])[0]
        first_one = failure.get("first") or {}
        named = first_one.get("rank") == 1 and first_one.get("step") in (FAILS_IN, None)
        yield holds("the report names rank 1", str(failure.get("summary", "no failure")), named)
        left = job.left()
        yield holds("no process is left", f"{left}" if left else "", not left)
        told_ = f"{took:.0f} s; from {report.get('rescued_from')}, {report.get('steps_redone')} steps redone"
        yield measured("the whole job, with its restart", told_, seconds=took)
        if not right:
            print(job.text()[-6000:], file=sys.stderr, flush=True)


def killed(place: Place) -> Iterator[Row]:
    yield from goes_on(place, "kill", "a rank is killed in mid-step")


def stuck_kernel(place: Place) -> Iterator[Row]:
    yield from goes_on(place, "kernel", "a rank waits for a kernel of a minute", ("--hang-timeout", "10"))


def stopped(place: Place) -> Iterator[Row]:
    """SIGTERM to the launcher ends the job after a step that is saved; the next run ends with the same weights."""
    with folders(2) as (first, second):
        calm = train(place, first, "none")
        if not place.on_gpu:
            calm.wait()
        job = train(place, second, "slow")
        while not (second / "has-begun").exists() and job.process.poll() is None and job.seconds < JOB_SECONDS:
            time.sleep(0.05)
        signalled = time.monotonic()
        job.process.send_signal(signal.SIGTERM)
        code = job.wait()
        took = time.monotonic() - signalled
        value = f"exit code {code}, {took:.1f} s: {job.last_line()}"
        saved = re.search(r"after step \d+ was saved", job.text())
        yield holds("SIGTERM: a step is saved, and the job ends", value, code == 143 and saved is not None)
        left = job.left()
        yield holds("no process is left", f"{left}" if left else "", not left)
        again = train(place, second, "none")
        codes = [calm.wait(), again.wait()]
        bits, expected = again.weights(), calm.weights()
        right = codes == [0, 0] and bits == expected
        yield holds("run again, SHA-256 as of an undisturbed job", f"{told(bits, expected)}, codes {codes}", right)
        if code != 143 or not right:
            print(job.text()[-3000:], again.text()[-3000:], file=sys.stderr, flush=True)
