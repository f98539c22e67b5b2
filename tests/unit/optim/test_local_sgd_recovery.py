"""DiLoCo and killed ranks: the restarted job ends with the bits of the undisturbed one, on every rank."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from processes import paceline, script

pytestmark = pytest.mark.slow
TRAIN = """
import os, signal, sys, threading, time
from pathlib import Path
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
import paceline
from paceline.core.digests import weights_sha256
from paceline.data import DataLoader
from paceline.optim import DiLoCo

folder, islands, victim, seconds = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])
folder.mkdir(exist_ok=True)
world = paceline.init(timeout=60)

def strike():
    time.sleep(seconds)
    (folder / "struck").touch()
    os.kill(os.getpid(), signal.SIGKILL)

if world.rank == victim and not (folder / "struck").exists():
    threading.Thread(target=strike, daemon=True).start()
with paceline.set_seed(0):
    data = torch.utils.data.TensorDataset(torch.randn(60, 8), torch.randn(60, 4))
    net = nn.Sequential(nn.Linear(8, 64), nn.Dropout(0.1), nn.BatchNorm1d(64), nn.Tanh(), nn.Linear(64, 4))
mesh = init_device_mesh("cpu", (islands, world.size // islands), mesh_dim_names=("between", "inside"))
model = paceline.DistributedDataParallel(net, device_mesh=mesh["inside"])
inner = torch.optim.AdamW(net.parameters(), lr=0.01)
outer = torch.optim.SGD(net.parameters(), lr=0.7, momentum=0.9, nesterov=True)
optimizer = DiLoCo(model, inner, outer, sync_every=8, fragments=2, delay=1, alpha=0.25, compress="int8")
checkpointer = paceline.Checkpointer(folder / "checkpoints", every=5)
checkpointer.register("model", model)
checkpointer.register("optimizer", optimizer)
loader = checkpointer.register("loader", DataLoader(data, batch_size=20, shuffle=True))
step = checkpointer.restore() if checkpointer.steps() else 0
while step < 60:
    for x, y in loader:
        time.sleep(0.005)
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        step = checkpointer.step()
        if step == 60:
            break
(folder / f"local-{world.rank}").write_text(weights_sha256(net))
optimizer.sync()
checkpointer.close()
(folder / f"final-{world.rank}").write_text(weights_sha256(net))
world.close()
"""


def digests(folder: Path, run: str, ranks: int, islands: int, victim: int = -1, seconds: float = 0) -> list[str]:
    """Train, and return the digest of every rank's weights before and after the last average."""
    arguments = [str(folder / run), str(islands), str(victim), str(seconds)]
    ended = paceline(folder, "run", "--nproc", str(ranks), "--max-restarts", "2", "script.py", *arguments, fork="all")
    assert ended.returncode == 0, ended.stderr
    return [(folder / run / f"{kind}-{rank}").read_text() for kind in ("local", "final") for rank in range(ranks)]


@pytest.mark.parametrize(("ranks", "islands"), [(2, 2), (4, 2)])
def test_job_killed_at_random_points_ends_with_the_same_bits(tmp_path: Path, ranks: int, islands: int) -> None:
    script(tmp_path, TRAIN)
    undisturbed = digests(tmp_path, "undisturbed", ranks, islands)
    local, final = undisturbed[:ranks], undisturbed[ranks:]
    assert len(set(local)) == islands
    assert len(set(final)) == 1
    for attempt in range(3):
        victim, seconds = random.randrange(ranks), random.uniform(0.05, 1.0)
        killed = digests(tmp_path, f"killed-{attempt}", ranks, islands, victim, seconds)
        assert killed == undisturbed, (victim, seconds)
