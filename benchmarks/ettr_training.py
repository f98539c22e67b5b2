"""The training that ettr_replay.py strikes: a small network on data of the size of the digits, until it is ended.

    paceline run ettr_training.py FOLDER paceline SECONDS_BETWEEN_FAULTS
    torchrun ettr_training.py FOLDER torch SECONDS_BETWEEN_FAULTS

Rank 0 writes a line for each completed step into FOLDER/steps: process, step, time, and seconds that it took to save.
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

SAMPLES, BATCH = 1437, 64
EVERY = timedelta(seconds=30)
"""Between saves on disk where completed steps are in memory anyway; for a fault that strikes all ranks at once."""


def network() -> nn.Module:
    """Return the network of the recipe `digits`, without importing Paceline."""
    layers: list[nn.Module] = []
    for before, after, stride in ((1, 16, 1), (16, 32, 2), (32, 64, 2)):
        layers += [nn.Conv2d(before, after, 3, stride, 1), nn.BatchNorm2d(after), nn.ReLU()]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(64 * 2 * 2, 10))


def data(rank: int, size: int, step: int) -> Tensor:
    """Return which samples `rank` takes in `step`."""
    order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(step))
    return order[:BATCH].tensor_split(size)[rank]


def train(step: int, one_step: Callable[[Tensor], tuple[int, float]], folder: Path) -> None:
    """Train from `step` on; `one_step` returns the steps done, and the seconds that saving took."""
    rank, size = dist.get_rank(), dist.get_world_size()
    with open(folder / "steps", "a", buffering=1) as log:
        while True:
            step, saving = one_step(data(rank, size, step))
            if rank == 0:
                log.write(f"{os.getpid()} {step} {time.time()} {saving}\n")


def with_paceline(folder: Path, inputs: Tensor, labels: Tensor) -> None:
    """Train with a Checkpointer whose `step` is called."""
    import paceline

    paceline.init()
    model = paceline.DistributedDataParallel(network())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    checkpointer = paceline.Checkpointer(folder / "checkpoints", every=EVERY)
    checkpointer.register("model", model)
    checkpointer.register("optimizer", optimizer)
    step = checkpointer.restore() if checkpointer.steps() else 0

    def one_step(batch: Tensor) -> tuple[int, float]:
        cross_entropy(model(inputs[batch]), labels[batch]).backward()
        optimizer.step()
        optimizer.zero_grad()
        began = time.monotonic()
        return checkpointer.step(), time.monotonic() - began

    train(step, one_step, folder)


def with_torch(folder: Path, inputs: Tensor, labels: Tensor, between_faults: float) -> None:
    """Train with torch's wrapper; rank 0 saves as often as Young and Daly advise."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    net = network()
    model = nn.parallel.DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    file, done = folder / "checkpoint.pt", 0
    if file.exists():
        state = torch.load(file, weights_only=True)
        net.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        done = state["step"]
    saved_at, cost = 0.0, 0.0

    def save(step: int) -> float:
        began = time.monotonic()
        state = {"model": net.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
        with open(file.with_suffix(".new"), "wb") as new:
            torch.save(state, new)
            new.flush()
            os.fsync(new.fileno())
        file.with_suffix(".new").replace(file)
        return time.monotonic() - began

    def one_step(batch: Tensor) -> tuple[int, float]:
        nonlocal done, saved_at, cost
        cross_entropy(model(inputs[batch]), labels[batch]).backward()
        optimizer.step()
        optimizer.zero_grad()
        done += 1
        if dist.get_rank() != 0 or time.monotonic() - saved_at < math.sqrt(2 * cost * between_faults):
            return done, 0.0
        cost = save(done)
        saved_at = time.monotonic()
        return done, cost

    train(done, one_step, folder)


def main() -> None:
    folder, kind, between_faults = Path(sys.argv[1]), sys.argv[2], float(sys.argv[3])
    rank = os.environ["RANK"]
    (folder / f"pid-{rank}.new").write_text(str(os.getpid()))
    (folder / f"pid-{rank}.new").replace(folder / f"pid-{rank}")
    torch.manual_seed(0)
    inputs, labels = torch.randn(SAMPLES, 1, 8, 8), torch.randint(0, 10, (SAMPLES,))
    if kind == "paceline":
        with_paceline(folder, inputs, labels)
    else:
        with_torch(folder, inputs, labels, between_faults)


if __name__ == "__main__":
    main()
