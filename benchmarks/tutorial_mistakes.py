"""The mistakes of widespread tutorials of data parallelism, each with a number, measured with torch's own wrapper.

    paceline run --nproc 2 benchmarks/tutorial_mistakes.py

The twin is one process on the whole global batch. No number here depends on the speed of the machine.
"""

from __future__ import annotations

from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.utils.data import DistributedSampler

import paceline
from dated_results import save
from paceline.core.processes.world import World
from paceline.tools.recipes.digits import load_digits

MICRO, WINDOW, STEPS = 16, 4, 10
HELD_OUT_RANKS = (2, 4, 7, 8)


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))


def flat(model: nn.Module) -> Tensor:
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None])


def relative(ours: Tensor, expected: Tensor) -> float:
    return float((ours - expected).norm() / expected.norm())


def spread(tensor: Tensor) -> float:
    """Return the largest difference between ranks, relative to the largest element."""
    low, high = tensor.clone(), tensor.clone()
    dist.all_reduce(low, dist.ReduceOp.MIN)
    dist.all_reduce(high, dist.ReduceOp.MAX)
    return float((high - low).max() / high.abs().max())


def accumulated(world: World, x: Tensor, y: Tensor, *, divide: bool, synchronized: str) -> tuple[Tensor, int]:
    """Accumulate a window; returns the gradient and how many micro-batches were synchronized."""
    model = TorchDDP(net())
    count = 0
    for micro in range(WINDOW):
        syncs = {"every": True, "last": micro == WINDOW - 1, "first": micro == 0}[synchronized]
        count += syncs
        start = micro * MICRO + world.rank * MICRO // world.size
        part = slice(start, start + MICRO // world.size)
        with nullcontext() if syncs else model.no_sync():
            (F.cross_entropy(model(x[part]), y[part]) / (WINDOW if divide else 1)).backward()
    return flat(model), count


def uneven(world: World, x: Tensor, y: Tensor, size: int) -> float:
    """Return the relative error of a mean of the ranks' means, for a batch that ranks cannot share evenly."""
    whole = net()
    F.cross_entropy(whole(x[:size]), y[:size]).backward()
    model = TorchDDP(net())
    part = slice(world.rank * size // world.size, (world.rank + 1) * size // world.size)
    F.cross_entropy(model(x[part]), y[part]).backward()
    return relative(flat(model), flat(whole))


def changed_after_wrapping(world: World, x: Tensor, y: Tensor) -> float:
    """Return how far ranks are apart after a few steps if a layer was added after wrapping."""
    model = TorchDDP(net())
    torch.manual_seed(1)
    model.module.append(nn.Linear(10, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        start = 2 * MICRO * step + world.rank * MICRO
        optimizer.zero_grad()
        F.cross_entropy(model(x[start : start + MICRO]), y[start : start + MICRO]).backward()
        optimizer.step()
    return spread(model.module[4].weight.detach())


def main() -> None:
    with paceline.init("gloo") as world:
        training, held_out = load_digits()
        x, y = training.tensors
        whole = net()
        F.cross_entropy(whole(x[: MICRO * WINDOW]), y[: MICRO * WINDOW]).backward()
        exact = flat(whole)
        plain, syncs = accumulated(world, x, y, divide=False, synchronized="every")
        first, _ = accumulated(world, x, y, divide=True, synchronized="first")
        right, _ = accumulated(world, x, y, divide=True, synchronized="last")
        padded = {
            ranks: sum(len(DistributedSampler(held_out, ranks, rank)) for rank in range(ranks)) - len(held_out)
            for ranks in HELD_OUT_RANKS
        }
        figures = {
            "accumulation, right: relative error of the gradient": relative(right, exact),
            "accumulation without dividing the loss: gradient relative to the right one": float(
                plain.norm() / exact.norm()
            ),
            "accumulation without no_sync: all-reduces per step": float(syncs),
            "accumulation, only the first micro-batch synchronized: ranks apart by": spread(first),
            "mean of means, 17 samples: relative error of the gradient": uneven(world, x, y, 17),
            "mean of means, 3 samples: relative error of the gradient": uneven(world, x, y, 3),
            f"a layer added after wrapping: ranks apart after {STEPS} steps by": changed_after_wrapping(world, x, y),
            **{f"DistributedSampler, {ranks} ranks: counted twice of 360": float(n) for ranks, n in padded.items()},
        }
        if world.is_main:
            for name, value in figures.items():
                print(f"{name:<80}{value:>12.4g}")
            save("tutorial-mistakes", {"ranks": world.size, "figures": figures})


if __name__ == "__main__":
    main()
