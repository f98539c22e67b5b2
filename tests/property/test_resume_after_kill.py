"""SIGKILL of the launcher in mid-epoch: nobody is left, and the same command with ``--resume`` ends with the very bits.

The runs are the real command on real data. The kill comes behind a checkpoint and in mid-epoch.
"""

from __future__ import annotations

import json
import os
import signal
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from paceline.ddp import wrapper
from processes import Running, gone_after, paceline, state_of

pytestmark = pytest.mark.slow

TRAINING_SAMPLES = 1437
EVERY = 20  # steps between checkpoints


@dataclass(frozen=True)
class Job:
    """A run, and where it is killed."""

    ranks: int
    batch_size: int
    epochs: int
    kills: tuple[tuple[int, int], ...]
    """For each kill the rank that is in the middle of a step then, and the step."""

    @property
    def steps(self) -> int:
        return self.epochs * -(-TRAINING_SAMPLES // self.batch_size)

    def arguments(self, *more: str) -> list[str]:
        chosen = {"--nproc": self.ranks, "--batch-size": self.batch_size, "--epochs": self.epochs}
        return ["train", "digits", *(str(word) for pair in chosen.items() for word in pair), "--json", "j", *more]


JOB = Job(2, 16, 3, kills=((1, 53), (0, 137)))


def report_of(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "j").read_text()))


def finished(folder: Path, arguments: list[str]) -> dict[str, Any]:
    """Run the command to its end; its report."""
    folder.mkdir()
    # More threads would wait for each other on a machine that is busy.
    done = paceline(folder, *arguments, fork="all", OMP_NUM_THREADS="1")
    assert (done.returncode, [line for line in done.stderr.splitlines() if not line.startswith("note:")]) == (0, [])
    return report_of(folder)


def hold(rank: int, step: int) -> None:
    """Have `rank` of the command, of which this is the process, stop in the `step`-th forward."""
    forwards = count(1)

    def strike(moment: str) -> None:
        if os.environ["RANK"] == str(rank) and next(forwards) == step:
            os.kill(os.getpid(), signal.SIGSTOP)

    wrapper.strike = strike


def killed(folder: Path, arguments: list[str], rank: int, step: int) -> None:
    """Kill the launcher while `rank` is held at the `step`-th forward of this start, so in the middle of the run."""
    folder.mkdir()
    with Running(folder, *arguments, fork="all", first=partial(hold, rank, step), OMP_NUM_THREADS="1") as job:
        job.wait_until(lambda: "T" in map(state_of, job.family()), "no rank has come to the step")
        family = job.family()
        job.process.kill()
        gone_after(family[1:], 5)
        assert job.process.wait(5) == -9
        assert job.leftovers == []


def test_the_resumed_run_ends_with_the_bits_of_an_undisturbed_one(tmp_path: Path) -> None:
    job = JOB
    undisturbed = finished(tmp_path / "undisturbed", job.arguments())
    assert (undisturbed["steps"], undisturbed["resumed_from_step"]) == (job.steps, None)
    points = tmp_path / "points"
    arguments = job.arguments("--checkpoint-dir", str(points), "--checkpoint-every", str(EVERY))
    step = 0
    for kill, (rank, at) in enumerate(job.kills):
        killed(tmp_path / f"killed-{kill}", arguments + ["--resume"] * bool(kill), rank, at - step)
        step = (at - 1) // EVERY * EVERY
    resumed = finished(tmp_path / "resumed", [*arguments, "--resume"])
    assert resumed["resumed_from_step"] == step
    assert resumed["steps"] == job.steps
    assert resumed["replica_sha256"] == undisturbed["replica_sha256"] == [undisturbed["replica_sha256"][0]] * job.ranks
    assert (resumed["accuracy"], resumed["test_loss"]) == (undisturbed["accuracy"], undisturbed["test_loss"])
    assert all(name.startswith("step-") for name in os.listdir(points)), "the killed save's draft is still there"
