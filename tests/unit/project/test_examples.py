"""The examples run as their docstrings say; the ones that cannot run here are well-formed."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from drawn import LONG
from processes import paceline, strike

ROOT = Path(__file__).parents[3]
EXAMPLES = ROOT / "examples"
EXAMPLE = EXAMPLES / "plain_loop.py"
RESILIENT = EXAMPLE.with_name("resilient_loop.py")


def accuracy(
    folder: Path, *arguments: str, program: tuple[str, ...] = (), first: Callable[[], None] | None = None
) -> str:
    done = paceline(folder, *arguments, program=program, fork="all", first=first, OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr
    assert ("starting all ranks again from step 99" in done.stderr) == (first is not None)
    [line] = [line for line in done.stdout.splitlines() if "accuracy" in line]
    return line


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The line that the script prints without a launcher."""
    return accuracy(tmp_path_factory.mktemp("alone"), program=(str(EXAMPLE),))


@pytest.mark.slow
def test_the_plain_loop_ends_with_the_same_accuracy_on_two_ranks(alone: str, tmp_path: Path) -> None:
    assert accuracy(tmp_path, "run", "--nproc", "2", str(EXAMPLE)) == alone
    assert alone.startswith("accuracy 0.9")


def test_unmarked_lines_form_an_ordinary_script() -> None:
    _, docstring, code = EXAMPLE.read_text().split('"""', 2)
    assert "Only the lines marked with ## differ" in docstring
    unmarked = [line for line in code.splitlines() if "##" not in line]
    assert not [line for line in unmarked if "paceline" in line or "world" in line]
    # An indented block belongs to its header line, so it is marked as well if that differs.
    lines = code.splitlines()
    heads = [number for number, line in enumerate(lines) if line.strip().startswith("with ") and "##" in line]
    assert heads
    assert all("##" in lines[number + 1] for number in heads)


@pytest.mark.slow
def test_the_resilient_loop_ends_with_the_same_accuracy_if_a_rank_is_killed(alone: str, tmp_path: Path) -> None:
    first = partial(strike, "forward rank=1 at=100")
    assert accuracy(tmp_path, "run", "--nproc", "2", str(RESILIENT), first=first) == alone


@pytest.mark.slow
def test_the_image_folder_is_learned_and_logged(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    pytest.importorskip("tensorboard")
    for label, shade in (("dark", 40), ("light", 200)):
        (tmp_path / "images" / label).mkdir(parents=True)
        for number in range(32):
            image.new("L", (20, 24), shade + number % 30).save(tmp_path / "images" / label / f"{number}.png")
    done = paceline(tmp_path, "run", "--nproc", "2", str(EXAMPLES / "image_folder.py"), "images", fork="all")
    assert done.returncode == 0, done.stderr
    assert "accuracy 100.0%" in done.stdout
    assert list((tmp_path / "runs" / "images").glob("events.*"))


only_long = pytest.mark.skipif(not LONG, reason="each rank imports much: make test-long")
SERVER = EXAMPLES / "parameter_server.py"


@pytest.mark.slow
def test_the_parameter_server_trains_and_plots_both_modes(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    done = paceline(tmp_path, "run", "--nproc", "3", str(SERVER), "--seconds", "1", fork="all", OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr
    asynchronous, synchronous = done.stdout.splitlines()
    match = re.fullmatch(r"asynchronous: (\d+) updates, ([\d.]+) stale on average; loss ([\d.]+)", asynchronous)
    assert match
    # In the long run, the other worker has always sent one gradient between two of a worker's own.
    assert 0 < float(match[2]) < 2
    synced = re.fullmatch(r"synchronous: (\d+) updates, none stale; loss ([\d.]+); see (.*)", synchronous)
    assert synced
    assert int(match[1]) > 0
    assert int(synced[1]) > 0
    assert all(float(loss) < 2.3 for loss in (match[3], synced[2]))  # ln 10 is the loss of guessing among ten classes
    assert (tmp_path / synced[3]).read_bytes().startswith(b"\x89PNG")


EXPERTS = EXAMPLES / "mixture_of_experts.py"


@pytest.mark.slow
def test_the_mixture_of_experts_matches_the_losses_of_one_process(tmp_path: Path) -> None:
    options, sizes = [str(EXPERTS), "--epochs", "2"], (0, 4)
    losses, tables, unused = [], [], []
    for size in sizes:  # 0: without a launcher
        how: Any = {"program": tuple(options)} if size == 0 else {}
        words = [] if size == 0 else ["run", "--nproc", str(size), *options]
        done = paceline(tmp_path, *words, **how, fork="all", OMP_NUM_THREADS="1")
        assert done.returncode == 0, done.stderr
        assert "UnusedParameterWarning" not in done.stderr
        losses.append([float(loss) for loss in re.findall(r"^epoch \d: loss ([\d.]+)$", done.stdout, re.MULTILINE)])
        tables.append(re.findall(r"^expert \d: .*$", done.stdout, re.MULTILINE))
        unused += map(float, re.findall(r"on rank 0 ([\d.]+) of 8 experts had no token", done.stdout))
    alone = losses[0]
    assert len(alone) == 2
    assert alone[1] < 0.2 < alone[0]
    for size, found in zip(sizes, losses, strict=True):
        assert found == pytest.approx(alone, abs=1e-6), size
    assert tables == [tables[0]] * len(sizes)
    assert len(tables[0]) == 8
    assert unused[-1] > unused[0]  # so ranks differed in which experts had gradients


FRAMEWORKS = [
    pytest.param("accelerate_loop", "accelerate", marks=only_long),
    pytest.param("hugging_face_trainer", "transformers", marks=only_long),
    pytest.param("fabric_loop", "lightning_fabric", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("name", "framework"), FRAMEWORKS)
def test_frameworks_train_with_our_wrapper(tmp_path: Path, name: str, framework: str) -> None:
    pytest.importorskip(framework)
    program = tmp_path / "program.py"
    program.write_text(CHECKED.format(example=str(EXAMPLES / f"{name}.py")))
    done = paceline(tmp_path, "run", "--nproc", "2", str(program), fork="all", OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr
    [line] = re.findall(r"^accuracy (0\.9\d*) on 2 ranks$", done.stdout, re.MULTILINE)
    assert float(line) > 0.9
    # Half of the micro-batches are only accumulated, which the framework passes on to our wrapper.
    assert done.stdout.count("forwards of our wrapper: [False, True]") == 2


CHECKED = """
import runpy, torch, paceline
own, forwards = paceline.DistributedDataParallel.forward, []
def counted(self, *arguments, **named):
    forwards.append(self.require_backward_grad_sync)
    return own(self, *arguments, **named)
paceline.DistributedDataParallel.forward = counted
runpy.run_path({example!r}, run_name="__main__")
print("forwards of our wrapper:", sorted(set(forwards)), flush=True)
"""

SCRIPTS = [EXAMPLES / "torchrun_two_hosts.sh", EXAMPLES / "slurm.sbatch"]


@pytest.mark.parametrize(
    ("number", "saves", "code", "is_put_back"),
    [
        (signal.SIGUSR1, True, 0, True),
        (signal.SIGUSR1, False, 0, True),  # before Python handles it, the signal ends the launcher with code 138
        (signal.SIGTERM, True, 85, False),  # a cancelled job is not requeued, although its step is saved
        (signal.SIGTERM, False, 143, False),
    ],
)
def test_the_slurm_job_is_only_requeued_after_its_time_limit_warning(
    tmp_path: Path, number: signal.Signals, saves: bool, code: int, is_put_back: bool
) -> None:
    launcher = "#!/bin/bash\n" + ("trap 'exit 85' USR1 TERM\n" if saves else "")
    launcher += "touch started\nwhile :; do sleep 0.05; done\n"
    for name, text in (("paceline", launcher), ("scontrol", '#!/bin/sh\necho "$@" >> requeued\n')):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "42"}
    job = subprocess.Popen(["bash", str(SCRIPTS[1]), "loop.py"], env=environment, cwd=tmp_path)
    try:
        while not (tmp_path / "started").exists():
            assert job.poll() is None
            time.sleep(0.01)
        job.send_signal(number)
        assert job.wait(60) == code
    finally:
        job.kill()
    assert (tmp_path / "requeued").exists() is is_put_back
