"""mpirun starts the ranks, and nothing bridges its environment variables to torchrun's."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from slurm import run

pytestmark = [pytest.mark.engines, pytest.mark.slow]

TRAINING = Path(__file__).with_name("training.py")
MPIRUN = ("-np", "2", "--allow-run-as-root", "--oversubscribe")
WEIGHTS = re.compile(r"^weights \w+ after step 240$", re.MULTILINE)


def test_ranks_of_mpirun_train_with_the_bits_of_paceline_run(mpirun: str, tmp_path: Path) -> None:
    lines = []
    for command in ((mpirun, *MPIRUN, "python"), ("paceline", "run", "--nproc", "2")):
        (tmp_path / "go").touch()
        done = run(*command, str(TRAINING), folder=tmp_path)
        assert done.returncode == 0, done.stderr
        lines += WEIGHTS.findall(done.stdout)
        shutil.rmtree(tmp_path / "checkpoints")
    assert lines == [lines[0]] * 2
