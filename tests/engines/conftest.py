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


@pytest.fixture
def mpirun() -> str:
    """The path of Open MPI's mpirun."""
    found = shutil.which("mpirun")
    if found is None:
        pytest.skip("Open MPI is not installed (mpirun not found): make test-engines")
    return found
