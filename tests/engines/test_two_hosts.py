"""`paceline run` and torchrun on two hosts (network namespaces): a rank ends, and the report names it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest

from namespaces import CABLE, Host, enter, two_hosts
from processes import TIMEOUT_S, Running, script

pytestmark = [pytest.mark.slow, pytest.mark.engines]
TORCHRUN = Path(__file__).parents[2] / "examples" / "torchrun_two_hosts.sh"
PORT = "29500"  # each test has separate namespaces

TRAIN = """
import os, signal, sys, warnings
from pathlib import Path
import torch
from torch import nn
import paceline
from paceline.core.digests import weights_sha256
from paceline.data import DataLoader

warnings.filterwarnings("ignore", "the process group uses Gloo")
shared, how = Path(__file__).parent, sys.argv[1]

def strike(rank, step):
    if (rank, step) != (1, 7) or (shared / "struck").exists():
        return
    (shared / "struck").touch()
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "raises":
        raise ValueError("the data is wrong")
    if how == "mistaken":
        raise paceline.UsageError("the data is wrong; take other data")

world = paceline.init(timeout=60)
with paceline.set_seed(0):
    data = torch.utils.data.TensorDataset(torch.randn(60, 8), torch.randn(60, 4))
    net = nn.Sequential(nn.Linear(8, 64), nn.Dropout(0.1), nn.Tanh(), nn.Linear(64, 4))
checkpointer = paceline.Checkpointer(shared / "checkpoints", every=3)
model = checkpointer.register("model", paceline.DistributedDataParallel(net))
optimizer = checkpointer.register("optimizer", torch.optim.AdamW(model.parameters(), lr=0.01))
loader = checkpointer.register("loader", DataLoader(data, batch_size=10, shuffle=True))
step = checkpointer.restore() if checkpointer.steps() else 0
while step < 12:
    for x, y in loader:
        strike(world.rank, step)
        with model.weight(len(x)):
            nn.functional.mse_loss(model(x), y, reduction="sum").backward()
        optimizer.step()
        optimizer.zero_grad()
        step = checkpointer.step()
checkpointer.close()
(shared / f"digest-{world.rank}").write_text(weights_sha256(model))
world.close()
"""
STATIC = ("--master-port", PORT)
C10D = ("--rdzv-backend", "c10d", "--rdzv-id", "job")


@pytest.fixture
def hosts() -> Iterator[list[Host]]:
    with two_hosts() as made:
        yield made


def paceline_run(hosts: list[Host], folder: Path, how: str, *options: str) -> list[tuple[int, str]]:
    """Train with `paceline run` on both hosts, two ranks each; return exit code and stderr per host."""
    with ExitStack() as stack:
        jobs = []
        for number, host in enumerate(hosts):
            where = ["--node-rank", str(number), "--master-addr", hosts[0].address]
            if "c10d" in options:
                # A host recognizes its own endpoint by the host name, which both hosts share here.
                conf = f"is_host={int(number == 0)}"
                endpoint = f"{hosts[0].address}:{PORT}"
                where = ["--rdzv-endpoint", endpoint, "--local-addr", host.address, "--rdzv-conf", conf]
            host_folder = folder / f"host-{number}"
            host_folder.mkdir(exist_ok=True)
            arguments = ["run", "--nnodes", "2", "--nproc", "2", *where, *options, str(folder / "train.py"), how]
            environment = {"GLOO_SOCKET_IFNAME": CABLE, "OMP_NUM_THREADS": "1"}
            first = partial(enter, host.name)
            jobs.append(stack.enter_context(Running(host_folder, *arguments, fork="all", first=first, **environment)))
        return [(job.wait(), job.stderr) for job in jobs]


def digest(folder: Path) -> str:
    """Return the digest of the weights, which must be equal on all ranks."""
    [found] = {(folder / f"digest-{rank}").read_text() for rank in range(4)}
    return found


@pytest.fixture
def undisturbed(hosts: list[Host], tmp_path: Path) -> str:
    folder = tmp_path / "undisturbed"
    folder.mkdir()
    script(folder, TRAIN, "train.py")
    ends = paceline_run(hosts, folder, "undisturbed", *STATIC)
    assert [code for code, _ in ends] == [0, 0], ends
    return digest(folder)


@pytest.mark.parametrize("rendezvous", [STATIC, C10D], ids=["static", "c10d"])
def test_restart_after_a_killed_rank_matches_the_undisturbed_bits(
    hosts: list[Host], tmp_path: Path, undisturbed: str, rendezvous: tuple[str, ...]
) -> None:
    script(tmp_path, TRAIN, "train.py")
    ends = paceline_run(hosts, tmp_path, "killed", "--max-restarts", "1", *rendezvous)
    assert [code for code, _ in ends] == [0, 0], ends
    assert digest(tmp_path) == undisturbed
    assert "Traceback" not in ends[0][1] + ends[1][1]


@pytest.mark.parametrize(
    ("how", "error", "tracebacks"),
    [
        ("killed", r"Signal 9 \(SIGKILL\)", 0),
        ("raises", r"ValueError: the data is wrong \(.*train.py, line \d+\)", 1),  # on the rank's stderr
        ("mistaken", "UsageError: the data is wrong; take other data", 0),
    ],
)
def test_torchrun_report_names_the_first_failed_rank_and_its_error(
    hosts: list[Host], tmp_path: Path, how: str, error: str, tracebacks: int
) -> None:
    script(tmp_path, TRAIN, "train.py")
    ends = paceline_run(hosts, tmp_path, how, *STATIC)
    assert [code for code, _ in ends] == [1, 1], ends
    causes = [stderr.partition("Root Cause")[2] for _, stderr in ends]
    assert re.search(rf"^  rank      : 1 .*\n(.*\n)*  traceback : {error}", causes[0], re.MULTILINE), ends[0][1]
    assert re.search(r"^  traceback : CommunicationError: rank [23]: ", causes[1], re.MULTILINE), ends[1][1]
    assert [stderr.count("Traceback") for _, stderr in ends] == [tracebacks, 0], ends


def torchrun(hosts: list[Host], folder: Path, how: str, *options: str) -> list[tuple[int, str]]:
    """Train with the example script, which starts torchrun, on both hosts; return exit code and stderr per host.

    Excludes the torchrun agent's log, which has a traceback if the host with the store ends first.
    """
    environment = os.environ | {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "MASTER_ADDR": hosts[0].address,
        "GLOO_SOCKET_IFNAME": CABLE,
        "OMP_NUM_THREADS": "1",
    }
    with ExitStack() as stack:
        jobs = []
        for number, host in enumerate(hosts):
            command = ["ip", "netns", "exec", host.name, str(TORCHRUN), *options]
            job = subprocess.Popen(
                [*command, "--log-dir", str(folder / f"host-{number}"), str(folder / "train.py"), how],
                env=environment | {"NODE_RANK": str(number)},
                cwd=folder,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
            stack.callback(job.kill)
            jobs.append(job)
        ends = [(job.communicate(timeout=TIMEOUT_S)[1], job.returncode) for job in jobs]
    agents = re.compile(r"^.*torch/distributed/elastic/agent/.*\n", re.MULTILINE)
    return [(code, agents.sub("", stderr)) for stderr, code in ends]


def test_torchrun_job_restarts_after_a_kill_and_matches_the_undisturbed_bits(
    hosts: list[Host], tmp_path: Path, undisturbed: str
) -> None:
    script(tmp_path, TRAIN, "train.py")
    ends = torchrun(hosts, tmp_path, "killed", "--max-restarts", "1")
    assert [code for code, _ in ends] == [0, 0], ends
    assert digest(tmp_path) == undisturbed
    assert "Traceback" not in ends[0][1] + ends[1][1]
