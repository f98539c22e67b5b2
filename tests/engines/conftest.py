"""Fixtures for tests with the engines of clusters, which are skipped where an engine is not installed."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import slurm


@pytest.fixture(scope="session")
def cluster() -> Iterator[slurm.Cluster]:
    """A Slurm cluster of two nodes, for all tests."""
    if reason := slurm.missing():
        pytest.skip(reason)
    # Not pytest's folder, whose path is long: the socket in it has a path of at most 107 bytes.
    with tempfile.TemporaryDirectory(prefix="slurm-", ignore_cleanup_errors=True) as folder:
        started = slurm.Cluster(Path(folder))
        try:
            started.start()
            yield started
        finally:
            started.stop()


@pytest.fixture(scope="session")
def mpirun() -> None:
    """Open MPI's mpirun is there."""
    if shutil.which("mpirun") is None:
        pytest.skip("Open MPI is not installed (mpirun not found): make test-engines")


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The last line of training.py when nothing disturbs it, and no engine starts it."""
    folder = tmp_path_factory.mktemp("undisturbed")
    (folder / "go").touch()
    done = slurm.run("paceline", "run", "--nproc", "2", str(Path(__file__).with_name("training.py")), folder=folder)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]
