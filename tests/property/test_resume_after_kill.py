"""SIGKILL of the launcher in mid-epoch: nobody is left, and the same command with ``--resume`` ends with the very bits.

The runs are the real command on real data. The moment of the kill is random, but behind a checkpoint and in mid-epoch.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from processes import TIMEOUT_S, Running, gone_after, paceline

pytestmark = pytest.mark.slow

TRAINING_SAMPLES = 1437
EVERY = 20  # steps between checkpoints; none is due in the first epoch's last step


@dataclass(frozen=True)
class Job:
    """A run that takes seconds, so that there is time to kill it."""

    ranks: int
    batch_size: int
    epochs: int
    kills: int

    @property
    def steps(self) -> int:
        return self.epochs * self.steps_per_epoch

    @property
    def steps_per_epoch(self) -> int:
        return -(-TRAINING_SAMPLES // self.batch_size)

    def arguments(self, *more: str) -> list[str]:
        chosen = {"--nproc": self.ranks, "--batch-size": self.batch_size, "--epochs": self.epochs}
        return ["train", "digits", *(str(word) for pair in chosen.items() for word in pair), "--json", "j", *more]


JOBS = [Job(1, 16, 3, kills=1), Job(2, 16, 3, kills=2), Job(4, 32, 3, kills=1)]


def report_of(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "j").read_text()))


def finished(folder: Path, arguments: list[str]) -> dict[str, Any]:
    """Run the command to its end; its report."""
    folder.mkdir()
    # More threads would wait for each other on a machine that is busy.
    done = paceline(folder, *arguments, fork="all", OMP_NUM_THREADS="1")
    assert (done.returncode, [line for line in done.stderr.splitlines() if not line.startswith("note:")]) == (0, [])
    return report_of(folder)


def newest(points: Path) -> int:
    """The newest whole checkpoint's step; 0 if there is none."""
    names = os.listdir(points) if points.exists() else []
    return max((int(name.removeprefix("step-")) for name in names if name.startswith("step-")), default=0)


def killed(folder: Path, arguments: list[str], points: Path, behind: int) -> int:
    """Kill the launcher some steps after a checkpoint later than `behind`; the newest checkpoint's step."""
    folder.mkdir()
    with Running(folder, *arguments, fork="all", OMP_NUM_THREADS="1") as job:
        deadline = time.monotonic() + TIMEOUT_S
        while newest(points) <= behind:
            assert job.process.poll() is None, job.stderr
            assert time.monotonic() < deadline, job.stdout
            time.sleep(0.005)
        time.sleep(0.03)
        family = job.family()
        job.process.kill()
        gone_after(family[1:], 5)
        assert job.process.wait(5) == -9
        assert not (folder / "j").exists(), "the run was over before it was killed"
        assert job.leftovers == []
    return newest(points)


@pytest.mark.parametrize("job", JOBS, ids=lambda job: f"{job.ranks}-ranks-killed-{job.kills}-times")
def test_the_resumed_run_ends_with_the_bits_of_an_undisturbed_one(tmp_path: Path, job: Job) -> None:
    undisturbed = finished(tmp_path / "undisturbed", job.arguments())
    assert (undisturbed["steps"], undisturbed["resumed_from_step"]) == (job.steps, None)
    points = tmp_path / "points"
    arguments = job.arguments("--checkpoint-dir", str(points), "--checkpoint-every", str(EVERY))
    step = 0
    for kill in range(job.kills):
        step = killed(tmp_path / f"killed-{kill}", arguments + ["--resume"] * bool(kill), points, behind=step)
        assert 0 < step < job.steps
        assert step % job.steps_per_epoch, "killed at an epoch's end"
    resumed = finished(tmp_path / "resumed", [*arguments, "--resume"])
    assert resumed["resumed_from_step"] == step
    assert resumed["steps"] == job.steps
    assert resumed["replica_sha256"] == undisturbed["replica_sha256"] == [undisturbed["replica_sha256"][0]] * job.ranks
    assert (resumed["accuracy"], resumed["test_loss"]) == (undisturbed["accuracy"], undisturbed["test_loss"])
    assert all(name.startswith("step-") for name in os.listdir(points)), "the killed save's draft is still there"
