"""Slurm runs the examples: jobs are warned, preempted, requeued and cancelled without losing a step or a bit."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from slurm import Cluster, Job

pytestmark = pytest.mark.engines

EXAMPLES = Path(__file__).parents[2] / "examples"
BATCH = str(EXAMPLES / "slurm.sbatch")
TRAINING = Path(__file__).with_name("training.py")
BEGINS = re.compile(r"^begins after step (\d+) as one of 2 ranks$", re.MULTILINE)
SAVED = re.compile(r"terminated by (SIG\w+), after step (\d+) was saved")
WEIGHTS = re.compile(r"^weights \w+ after step 240$", re.MULTILINE)


@pytest.fixture
def slurm(cluster: Cluster) -> Cluster:
    """The idle cluster."""
    cluster.cancel_all()
    return cluster


def test_example_runs_unchanged(slurm: Cluster, tmp_path: Path) -> None:
    (tmp_path / "examples").mkdir()
    shutil.copy(EXAMPLES / "resilient_loop.py", tmp_path / "examples")  # its default folder
    job = slurm.submit(tmp_path, BATCH)
    job.wait_for("COMPLETED")
    assert re.search(r"^accuracy 0\.9", job.output, re.MULTILINE), job.output


def warn_of_the_time_limit(job: Job) -> None:
    hours, minutes, _ = map(int, job.field("RunTime").split(":"))
    job.update(TimeLimit=str(60 * hours + minutes + 2))  # Slurm checks every half minute whether a warning is due


def requeue(job: Job) -> None:
    job.cluster.call("scontrol", "requeue", job.number)


def preempt(job: Job) -> None:
    """Submit a job of higher priority that briefly takes both nodes."""
    job.cluster.submit(job.folder, "-p", "urgent", "-N", "2", "--exclusive", "-o", "urgent.out", "--wrap", "true")


@pytest.mark.parametrize(
    ("disturb", "number"), [(warn_of_the_time_limit, "SIGUSR1"), (requeue, "SIGTERM"), (preempt, "SIGTERM")]
)
def test_requeued_job_matches_an_undisturbed_run_bitwise(
    slurm: Cluster, tmp_path: Path, undisturbed: str, disturb: Callable[[Job], None], number: str
) -> None:
    job = slurm.submit(tmp_path, BATCH, str(TRAINING))
    for rank in range(2):
        job.wait_for_file(f"trains-{rank}")
    disturb(job)
    job.wait_for("PENDING")
    [(signal, step)] = SAVED.findall(job.output)
    assert signal == number
    assert int(step) >= 10
    (tmp_path / "go").touch()
    # Slurm would delay it for two minutes. A start in the same second as slurmd ended it would be refused (credential
    # revoked), and the job would fail.
    job.update(TimeLimit="60", StartTime="now+3")
    job.wait_for("COMPLETED")
    assert BEGINS.findall(job.output) == ["0", step]
    assert WEIGHTS.findall(job.output) == [undisturbed]
    assert job.field("Restarts") == "1"
    assert "Traceback" not in job.output, job.output


def test_cancelled_job_is_saved_and_not_requeued(slurm: Cluster, tmp_path: Path, undisturbed: str) -> None:
    job = slurm.submit(tmp_path, BATCH, str(TRAINING))
    for rank in range(2):
        job.wait_for_file(f"trains-{rank}")
    slurm.call("scancel", job.number)
    job.wait_for("CANCELLED")
    slurm.cancel_all()  # waits for its end
    [(signal, step)] = SAVED.findall(job.output)
    assert signal == "SIGTERM"
    assert (job.field("JobState"), job.field("Restarts")) == ("CANCELLED", "0")
    (tmp_path / "go").touch()
    again = slurm.submit(tmp_path, BATCH, str(TRAINING))
    again.wait_for("COMPLETED")
    assert BEGINS.findall(again.output) == [step]
    assert WEIGHTS.findall(again.output) == [undisturbed]


def test_job_with_a_failing_script_fails_without_requeueing(slurm: Cluster, tmp_path: Path) -> None:
    job = slurm.submit(tmp_path, BATCH, "nowhere.py")
    job.wait_for("FAILED")
    assert (job.field("ExitCode"), job.field("Restarts")) == ("2:0", "0")
    assert job.output.count("\n") == 1, job.output
    assert "nowhere.py" in job.output


def test_array_tasks_have_separate_folders(slurm: Cluster, tmp_path: Path, undisturbed: str) -> None:
    for task in range(2):
        (tmp_path / f"task-{task}").mkdir()
    shutil.copy(TRAINING, tmp_path)
    number = slurm.submit(tmp_path, "--array=0-1", BATCH, "training.py").number
    tasks = [Job(slurm, f"{number}_{task}", tmp_path) for task in range(2)]
    for index, task in enumerate(tasks):
        for rank in range(2):
            task.wait_for_file(f"task-{index}/trains-{rank}")  # both run simultaneously and wait
    for index, task in enumerate(tasks):
        (tmp_path / f"task-{index}" / "go").touch()
        task.wait_for("COMPLETED")
        assert WEIGHTS.findall(task.output) == [undisturbed]


@pytest.mark.parametrize("nodes", ["-N2", "-N1"])
def test_srun_starts_the_ranks(slurm: Cluster, tmp_path: Path, undisturbed: str, nodes: str) -> None:
    (tmp_path / "go").touch()
    done = slurm.run("srun", nodes, "-n2", "python", str(TRAINING), folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert WEIGHTS.findall(done.stdout) == [undisturbed]
    assert done.stderr == ""


def test_ranks_started_by_srun_save_their_step_when_the_job_is_cancelled(
    slurm: Cluster, tmp_path: Path, undisturbed: str
) -> None:
    job = slurm.submit(tmp_path, "-N", "2", "-n", "2", "--wrap", f"srun python {TRAINING}")
    for rank in range(2):
        job.wait_for_file(f"trains-{rank}")
    slurm.call("scancel", job.number)
    slurm.cancel_all()
    [saved] = (tmp_path / "checkpoints").glob("step-*")
    (tmp_path / "go").touch()
    done = slurm.run("srun", "-N", "2", "-n", "2", "python", str(TRAINING), folder=tmp_path)
    assert list(map(int, BEGINS.findall(done.stdout))) == [int(saved.name.removeprefix("step-"))], job.output
    assert WEIGHTS.findall(done.stdout) == [undisturbed]


def test_srun_starts_a_launcher_on_each_node(slurm: Cluster, tmp_path: Path, undisturbed: str) -> None:
    (tmp_path / "go").touch()
    script = str(EXAMPLES / "torchrun_two_hosts.sh")
    done = slurm.run(
        "srun",
        "-N",
        "2",
        "--ntasks-per-node",
        "1",
        script,
        str(TRAINING),
        folder=tmp_path,
        MASTER_ADDR="localhost",
        NPROC="1",
    )
    assert done.returncode == 0, done.stderr
    assert WEIGHTS.findall(done.stdout) == [undisturbed]
