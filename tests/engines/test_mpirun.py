"""Ranks started by mpirun, without translating its environment variables to those of torchrun."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from slurm import run

pytestmark = [pytest.mark.engines, pytest.mark.slow]

TRAINING = str(Path(__file__).with_name("training.py"))
MPIRUN = ("mpirun", "-np", "2", "--allow-run-as-root")
WEIGHTS = re.compile(r"^weights \w+ after step 240$", re.MULTILINE)


@pytest.fixture
def two_hosts(mpirun: None, tmp_path: Path) -> list[str]:
    """The command for one rank on each of two hosts, which are both this one; an agent replaces ssh."""
    agent = tmp_path / "agent"  # with a program named ssh, mpirun would pass further options
    agent.write_text('#!/bin/sh\nshift\nexec sh -c "$*"\n')
    agent.chmod(0o755)
    hosts = ["--host", "first:1,second:1", "--bind-to", "none"]  # otherwise both would take the first core
    return [*MPIRUN, "--mca", "plm_rsh_agent", str(agent), *hosts]


def test_mpirun_ranks_train_bit_identically_to_paceline_run(
    two_hosts: list[str], tmp_path: Path, undisturbed: str
) -> None:
    hosts = [*two_hosts, "-x", "MASTER_ADDR=127.0.0.1"]
    for number, command in enumerate(([*MPIRUN, "--oversubscribe"], hosts)):
        (folder := tmp_path / str(number)).mkdir()
        (folder / "go").touch()
        done = run(*command, "python", TRAINING, folder=folder)
        assert done.returncode == 0, done.stderr
        assert WEIGHTS.findall(done.stdout) == [undisturbed]


def test_ranks_on_several_hosts_without_an_address_are_refused_in_one_line_each(
    two_hosts: list[str], tmp_path: Path
) -> None:
    done = run(*two_hosts, "python", TRAINING, folder=tmp_path)
    assert done.returncode in (2, 139)  # Open MPI 4.1 sometimes crashes itself (139) when all ranks end at once
    assert "does not report the host of rank 0; set MASTER_ADDR to that host on all ranks (mpirun -x" in done.stderr
    assert "Traceback" not in done.stderr
