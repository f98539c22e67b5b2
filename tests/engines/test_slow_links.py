"""DiLoCo between two hosts whose link is cut: the islands wait, raise an error, or continue alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest

from namespaces import enter, two_hosts
from processes import Running, script
from slow_link import SLOW, SlowLink

pytestmark = [pytest.mark.slow, pytest.mark.engines]
PORT = "29500"  # each test has separate namespaces
TRAIN = """
import sys, time, warnings
from pathlib import Path
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
import paceline
from paceline.core.digests import weights_sha256
from paceline.optim import DiLoCo

warnings.filterwarnings("ignore", "the process group uses Gloo")
shared, timeout, on_lost, steps = Path(__file__).parent, float(sys.argv[1]), sys.argv[2], int(sys.argv[3])
world = paceline.init(timeout=120)
with paceline.set_seed(0):
    net = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 4))
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("between", "inside"))
model = paceline.DistributedDataParallel(net, device_mesh=mesh["inside"])
inner = torch.optim.AdamW(net.parameters(), lr=0.01)
outer = torch.optim.SGD(net.parameters(), lr=0.7, momentum=0.9, nesterov=True)
optimizer = DiLoCo(model, inner, outer, sync_every=20, delay=15, on_lost_island=on_lost, timeout=timeout)
generator = torch.Generator().manual_seed(world.rank)
for step in range(steps):
    if step == 20:
        (shared / f"ready-{world.rank}").touch()
        while not (shared / "go").exists():
            time.sleep(0.01)
    model(torch.randn(8, 8, generator=generator)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    with (shared / f"steps-{world.rank}").open("a") as file:
        file.write(f"{step} {time.time()}\\n")
(shared / f"weights-{world.rank}").write_text(weights_sha256(net))
world.close()
"""


@pytest.fixture
def link() -> Iterator[SlowLink]:
    with two_hosts() as hosts, SlowLink(hosts) as slow:
        yield slow


def train(link: SlowLink, folder: Path, cut_s: float, *arguments: str) -> list[tuple[int, str]]:
    """Train on both hosts, cut the link after step 20, and return exit code and stderr per host."""
    folder.mkdir()
    script(folder, TRAIN, "train.py")
    with ExitStack() as stack:
        jobs = []
        for number, host in enumerate(link.hosts):
            own = folder / f"host-{number}"
            own.mkdir()
            where = ["--node-rank", str(number), "--master-addr", link.addresses[0], "--master-port", PORT]
            command = ["run", "--nnodes", "2", "--nproc", "2", *where, str(folder / "train.py"), *arguments]
            environment = {"GLOO_SOCKET_IFNAME": SLOW, "OMP_NUM_THREADS": "1"}
            first = partial(enter, host.name)
            jobs.append(stack.enter_context(Running(own, *command, fork="all", first=first, **environment)))
        jobs[0].wait_for(*(str(folder / f"ready-{rank}") for rank in range(4)))
        if cut_s:
            link.cut(cut_s)
        (folder / "go").touch()
        return [(job.wait(), job.stderr) for job in jobs]


def weights(folder: Path) -> list[str]:
    return [(folder / f"weights-{rank}").read_text() for rank in range(4)]


def times(folder: Path, rank: int) -> list[float]:
    return [float(line.split()[1]) for line in (folder / f"steps-{rank}").read_text().splitlines()]


def test_islands_train_while_the_link_is_cut_then_wait_and_end_with_the_same_bits(
    link: SlowLink, tmp_path: Path
) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    for folder, seconds in ((whole, 0), (cut, 30)):
        ends = train(link, folder, seconds, "110", "raise", "60")
        assert [code for code, _ in ends] == [0, 0], ends
    assert weights(cut) == weights(whole)
    for rank in range(4):
        at = times(cut, rank)
        assert at[38] - at[20] < 15 < at[39] - at[38]  # the message of step 25 is needed in step 40


def test_lost_island_is_named_on_every_rank_and_ends_the_job(link: SlowLink, tmp_path: Path) -> None:
    ends = train(link, tmp_path / "cut", 1000, "5", "raise", "60")
    assert all(code == 1 for code, _ in ends), ends
    for number, (_, stderr) in enumerate(ends):
        other = 1 - number
        lost = f"the outer step of island {number} with island {other} (ranks {2 * other}, {2 * other + 1}) failed"
        assert lost in stderr


def test_each_island_continues_alone_after_a_cut_if_configured(link: SlowLink, tmp_path: Path) -> None:
    folder = tmp_path / "cut"
    ends = train(link, folder, 20, "5", "continue", "60")
    for number, (_, stderr) in enumerate(ends):
        assert f"island {number} continues alone" in stderr
    first, second, third, fourth = weights(folder)
    assert first == second != third == fourth
