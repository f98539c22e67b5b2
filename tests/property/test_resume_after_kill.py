"""After SIGKILL of the launcher no process remains, and the command with ``--resume`` ends with the same bits.

The tests run the real command on real data and kill it in the middle of an epoch, after a checkpoint.
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
    """A run and its kills."""

    ranks: int
    batch_size: int
    epochs: int
    kills: tuple[tuple[int, int], ...]
    """For each kill, the rank that is stopped in a step, and the step."""

    @property
    def steps(self) -> int:
        return self.epochs * -(-TRAINING_SAMPLES // self.batch_size)

    def arguments(self, *more: str) -> list[str]:
        chosen = {"--nproc": self.ranks, "--batch-size": self.batch_size, "--epochs": self.epochs}
        return ["train", "digits", *(str(word) for pair in chosen.items() for word in pair), "--json", "j", *more]


JOB = Job(2, 16, 3, kills=((1, 53), (0, 137)))


def report_of(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "j").read_text()))


def run_to_the_end(folder: Path, arguments: list[str]) -> dict[str, Any]:
    """Run the command until it exits and return its report."""
    folder.mkdir()
    # More threads would wait for each other on a busy machine.
    done = paceline(folder, *arguments, fork="all", OMP_NUM_THREADS="1")
    assert (done.returncode, [line for line in done.stderr.splitlines() if not line.startswith("note:")]) == (0, [])
    return report_of(folder)


def stop_rank_at(rank: int, step: int) -> None:
    """Make `rank` of the command stop with SIGSTOP in its `step`-th forward; runs in the command's process."""
    forwards = count(1)

    def strike(moment: str) -> None:
        if os.environ["RANK"] == str(rank) and next(forwards) == step:
            os.kill(os.getpid(), signal.SIGSTOP)

    wrapper.strike = strike


def run_and_kill(folder: Path, arguments: list[str], rank: int, step: int) -> None:
    """Kill the launcher while `rank` is stopped in the `step`-th forward of this start."""
    folder.mkdir()
    with Running(folder, *arguments, fork="all", first=partial(stop_rank_at, rank, step), OMP_NUM_THREADS="1") as job:
        job.wait_until(lambda: "T" in map(state_of, job.family()), "no rank has reached the step")
        family = job.family()
        job.process.kill()
        gone_after(family[1:], 5)
        assert job.process.wait(5) == -9
        assert job.leftovers == []


def test_resumed_run_ends_with_the_bits_of_an_uninterrupted_one(tmp_path: Path) -> None:
    job = JOB
    whole = run_to_the_end(tmp_path / "uninterrupted", job.arguments())
    assert (whole["steps"], whole["resumed_from_step"]) == (job.steps, None)
    checkpoints = tmp_path / "checkpoints"
    arguments = job.arguments("--checkpoint-dir", str(checkpoints), "--checkpoint-every", str(EVERY))
    step = 0
    for kill, (rank, at) in enumerate(job.kills):
        run_and_kill(tmp_path / f"killed-{kill}", arguments + ["--resume"] * bool(kill), rank, at - step)
        step = (at - 1) // EVERY * EVERY
    resumed = run_to_the_end(tmp_path / "resumed", [*arguments, "--resume"])
    assert resumed["resumed_from_step"] == step
    assert resumed["steps"] == job.steps
    assert resumed["replica_sha256"] == whole["replica_sha256"] == [whole["replica_sha256"][0]] * job.ranks
    assert (resumed["accuracy"], resumed["test_loss"]) == (whole["accuracy"], whole["test_loss"])
    assert all(name.startswith("step-") for name in os.listdir(checkpoints)), "the draft of the killed save remains"
