"""Fixtures for tests with cluster engines; tests are skipped if their engine is not installed."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import slurm


@pytest.fixture(scope="session")
def cluster() -> Iterator[slurm.Cluster]:
    """A Slurm cluster of two nodes, shared by all tests."""
    if reason := slurm.missing():
        pytest.skip(reason)
    # pytest's folder has a long path, but socket paths are limited to 107 bytes.
    with tempfile.TemporaryDirectory(prefix="slurm-", ignore_cleanup_errors=True) as folder:
        started = slurm.Cluster(Path(folder))
        try:
            started.start()
            yield started
        finally:
            started.stop()


@pytest.fixture(scope="session")
def mpirun() -> None:
    """Require Open MPI's mpirun."""
    if shutil.which("mpirun") is None:
        pytest.skip("Open MPI is not installed (mpirun not found): make test-engines")


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The last line printed by training.py in an undisturbed run without an engine."""
    folder = tmp_path_factory.mktemp("undisturbed")
    (folder / "go").touch()
    done = slurm.run("paceline", "run", "--nproc", "2", str(Path(__file__).with_name("training.py")), folder=folder)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]
