"""Training steps with one slow rank: equal slices and slices in proportion to speed, in turns.

    paceline run --nproc 2 benchmarks/unlike_devices.py
    paceline run --nproc 4 benchmarks/unlike_devices.py --kinds sleep

The last rank is 1.5, 2 or 3 times slower. There are two kinds of devices:

- ``work``: the slow rank runs forward and backward on extra samples. This keeps its core busy, so every rank needs a
  separate core.
- ``sleep``: in addition to training a small model, every rank sleeps 2 ms per sample, and the slow rank longer. This
  simulates a slow device without using a core, so it also works with more ranks than cores.

The harmonic ideal is B / Σ v for B samples and speeds of v samples per second. A speed is computed from a rank's time
per sample, without waiting, in the run with equal slices. Times are medians over steps.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.utils.data import TensorDataset

import paceline
from harness import median_ratio, parser_of, save, take_turns
from paceline.core.world import World
from paceline.data import DataLoader
from paceline.data.slices import shares_by_speed

FACTORS = (1.5, 2.0, 3.0)
SLEEP_S, TURN = 0.002, 12
KINDS: dict[str, tuple[int, int]] = {"work": (512, 384), "sleep": (64, 48)}
"""Width of the model, and number of samples per rank."""


class Device:
    """A device that is slower than the others by `factor`."""

    def __init__(self, kind: str, factor: float, net: nn.Module) -> None:
        self.kind, self.factor, self.net = kind, factor, copy.deepcopy(net)

    def lose_time(self, x: Tensor) -> None:
        """Spend the extra time that a slow device would need for the samples `x`."""
        if self.kind == "sleep":
            time.sleep(SLEEP_S * self.factor * len(x))
        elif more := round((self.factor - 1) * len(x)):
            again = x.repeat(math.ceil(self.factor - 1), 1)[:more]
            torch.autograd.grad(self.net(again).square().sum(), list(self.net.parameters()))


class Variant:
    """A training run with equal slices, or with slices in proportion to `speed`."""

    def __init__(self, kind: str, device: Device, steps: int, speed: Any, wrap: Callable[[nn.Module], Any]) -> None:
        width, batch = KINDS[kind][0], KINDS[kind][1] * dist.get_world_size()
        self.device = device
        data = TensorDataset(torch.randn(4 * batch, width))
        self.loader = DataLoader(data, batch, speed=speed)
        self.model = wrap(copy.deepcopy(device.net))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-6)
        self.batches: Any = iter(())
        self.samples: list[int] = []
        self.own_seconds: list[float] = []
        """Seconds per sample of each step, without the time spent waiting for other ranks."""
        self.run(steps)

    def run(self, steps: int) -> list[float]:
        """Train for this number of steps, and return the seconds of each."""
        is_ours = isinstance(self.model, paceline.DistributedDataParallel)
        taken: list[float] = []
        dist.barrier()
        while len(taken) < steps:
            for (x,) in self.loader:  # if left early, the loader continues there next time
                began, waited = time.perf_counter(), self.model.exposed_seconds if is_ours else 0.0
                self.device.lose_time(x)
                if is_ours:
                    with self.model.weight(len(x)):
                        self.model(x).square().sum().backward()
                else:
                    self.model(x).square().sum().backward()
                self.optimizer.step()
                self.optimizer.zero_grad()
                taken.append(time.perf_counter() - began)
                if is_ours:
                    self.own_seconds.append((taken[-1] - (self.model.exposed_seconds - waited)) / len(x))
                self.samples.append(len(x))
                if len(taken) == steps:
                    break
        return taken

    def turn(self) -> float:
        """Run a turn, and return the median seconds of a step."""
        return median(self.run(TURN))


def slices(variant: Variant) -> list[int]:
    """Return the typical number of samples in each rank's latest slices."""
    counts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(counts, int(median(variant.samples[-TURN:])))
    return counts


def measure(world: World, kind: str, factor: float, rounds: int, gloo: Any) -> dict[str, Any]:
    """Measure all variants with a last rank that is slower by `factor`."""
    width, batch = KINDS[kind][0], KINDS[kind][1] * world.size
    torch.manual_seed(0)
    net = nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(width, width), nn.ReLU())))
    device = Device(kind, factor if world.rank == world.size - 1 else 1.0, net)
    given = [1.0] * (world.size - 1) + [1 / factor]
    make = partial(Variant, kind, device)
    variants = {
        "torch DDP": make(5, None, lambda module: TorchDDP(module, process_group=gloo, gradient_as_bucket_view=True)),
        "equal": make(5, None, paceline.DistributedDataParallel),
        "given": make(5, given, paceline.DistributedDataParallel),
    }
    turns = take_turns({name: variant.turn for name, variant in variants.items()}, rounds, rotated=True)
    own: list[Any] = [None] * world.size
    dist.all_gather_object(own, median(variants["equal"].own_seconds))
    ideal = batch / math.fsum(1 / seconds for seconds in own)
    steps = {name: median(seconds) for name, seconds in turns.items()}
    return {
        "kind": kind,
        "slower": factor,
        "seconds_for_a_sample": own,
        "steps": steps,
        "ideal_step": ideal,
        "slices": {name: slices(variant) for name, variant in variants.items()},
        "by_given_speeds": list(shares_by_speed(batch, tuple(given))),
        "given / ideal": steps["given"] / ideal,
        "equal / given": median_ratio(turns["equal"], turns["given"]),
        "torch DDP / given": median_ratio(turns["torch DDP"], turns["given"]),
        "equal / ideal": steps["equal"] / ideal,
    }


def main() -> None:
    """Measure every kind and factor, and save the table."""
    parser = parser_of(__doc__, 5)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    options = parser.parse_args()
    with paceline.init() as world:
        torch.set_num_threads(1)
        gloo = dist.new_group(backend="gloo")
        rows = []
        for kind in options.kinds:
            for factor in FACTORS:
                row = measure(world, kind, factor, options.rounds, gloo)
                rows.append(row)
                if world.is_main:
                    steps = "  ".join(f"{name} {1e3 * seconds:6.1f}" for name, seconds in row["steps"].items())
                    print(
                        f"{kind:<6} {factor}×: {steps}  ideal {1e3 * row['ideal_step']:6.1f} ms; given / ideal "
                        f"{row['given / ideal']:.3f}; torch DDP / given {row['torch DDP / given']:.2f}, "
                        f"equal / ideal {row['equal / ideal']:.2f}; slices {row['slices']['given']}",
                        flush=True,
                    )
        if world.is_main:
            print("kept in", save(f"unlike-devices-{world.size}-ranks", rows))


if __name__ == "__main__":
    main()
