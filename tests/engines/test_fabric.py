"""Fabric with Paceline's wrapper, on ranks started by an engine instead of Paceline's launcher."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from slurm import Cluster, run

pytestmark = pytest.mark.engines

EXAMPLE = str(Path(__file__).parents[2] / "examples" / "fabric_loop.py")


def assert_trained(output: str, ranks: int) -> None:
    [accuracy] = re.findall(rf"^accuracy (0\.\d+) on {ranks} ranks$", output, re.MULTILINE)
    assert float(accuracy) > 0.9


@pytest.mark.parametrize(("how", "ranks"), [("-N2 --ntasks-per-node=2", 4), ("-n2", 2)])
def test_fabric_trains_on_ranks_started_by_srun(cluster: Cluster, tmp_path: Path, how: str, ranks: int) -> None:
    # Fabric received the total number of ranks as the devices per node, and refused it.
    pytest.importorskip("lightning_fabric")
    done = cluster.run("srun", *how.split(), "python", EXAMPLE, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert_trained(done.stdout, ranks)


@pytest.mark.slow
def test_fabric_trains_on_ranks_started_by_mpirun(mpirun: None, tmp_path: Path) -> None:
    pytest.importorskip("lightning_fabric")
    done = run("mpirun", "-np", "2", "--allow-run-as-root", "--oversubscribe", "python", EXAMPLE, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert_trained(done.stdout, 2)
