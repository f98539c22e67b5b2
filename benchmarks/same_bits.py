"""Cost of virtual ranks, which make results bit-identical on any number of ranks: steps with and without, in turns.

    paceline run --nproc 2 benchmarks/same_bits.py
    paceline run --nproc 2 benchmarks/same_bits.py --backend gloo

For a small GPT and a small MLP, with one global batch:

- ``equal``: N virtual ranks against an ordinary step, both with one slice on each rank. Only the tree of sums differs.
- ``accumulated``: V virtual ranks against ordinary accumulation of the same micro-batches.
- ``whole``: V virtual ranks against an ordinary step that computes a rank's whole share at once. This shows the cost of
  small slices.
- ``half``: the same with half as many slices.

Times are medians over turns. Ratios are computed within each round; the median is reported. Steps include AdamW.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import paceline
from harness import median_ratio, parser_of, save, slowest_timed, take_turns
from paceline.core.world import World
from paceline.data import DataLoader
from workloads import SmallGPT, mlp

STEPS, SLICES = 6, 8
VOCABULARY, LENGTH = 1000, 64


def gpt() -> tuple[nn.Module, TensorDataset]:
    """Return a GPT with 2 million parameters, and 64 sequences."""
    tokens = torch.randint(VOCABULARY, (64, LENGTH + 1))
    return SmallGPT(VOCABULARY, 192, 4, LENGTH), TensorDataset(tokens[:, :-1], tokens[:, 1:])


def small_mlp() -> tuple[nn.Module, TensorDataset]:
    """Return an MLP with 0.3 million parameters, and 512 samples."""
    return mlp(256, 4), TensorDataset(torch.randn(512, 256), torch.randint(10, (512, 1)))


WORKLOADS: dict[str, tuple[Callable[[], tuple[nn.Module, TensorDataset]], int]] = {
    "gpt": (gpt, 32),
    "mlp": (small_mlp, 128),
}
"""A model, its data, and the number of samples in a global batch."""


def summed_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, float]:
    """Return the summed loss of a batch, and its number of targets."""
    x, y = batch
    return F.cross_entropy(model(x), y.flatten(), reduction="sum"), y.numel()


class Variant:
    """A variant of training `net`.

    Args:
        net: the model, which is copied.
        data: the samples.
        batch: samples per step, over all ranks.
        virtual_ranks: number of virtual ranks; None for an ordinary wrapper.
        every: micro-batches per step, without virtual ranks.
        steps: number of steps in a turn.
    """

    def __init__(
        self,
        net: nn.Module,
        data: TensorDataset,
        batch: int,
        virtual_ranks: int | None = None,
        every: int = 1,
        *,
        steps: int = STEPS,
    ) -> None:
        self.model = paceline.DistributedDataParallel(copy.deepcopy(net), virtual_ranks=virtual_ranks)
        self.every, self.steps = None if virtual_ranks else every, steps
        self.loader = DataLoader(data, batch // every, drop_last=True)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.run()

    def run(self) -> None:
        """Take some steps."""
        taken = 0
        while taken < self.steps:
            for x, y in paceline.accumulate(self.model, self.loader, self.every):
                loss, weight = summed_loss(self.model, (x, y))
                with self.model.weight(weight):
                    loss.backward()
                if not self.model.do_sync:
                    continue
                self.optimizer.step()
                self.optimizer.zero_grad()
                taken += 1
                if taken == self.steps:
                    break

    def turn(self) -> float:
        """Run a turn, and return the seconds per step on the slowest rank."""
        return slowest_timed(self.run, 1) / self.steps


def measure(world: World, name: str, rounds: int) -> dict[str, Any]:
    """Measure all variants of a workload."""
    torch.manual_seed(0)
    build, batch = WORKLOADS[name]
    net, data = build()
    make = partial(Variant, net, data, batch)
    variants = {
        "ordinary": make(),
        "equal": make(virtual_ranks=world.size),
        "accumulated": make(every=SLICES // world.size),
        "virtual": make(virtual_ranks=SLICES),
        "virtual, half": make(virtual_ranks=SLICES // 2),
    }
    turns = take_turns({each: variant.turn for each, variant in variants.items()}, rounds, rotated=True)
    ratios = {
        "equal / ordinary": median_ratio(turns["equal"], turns["ordinary"]),
        "virtual / accumulated": median_ratio(turns["virtual"], turns["accumulated"]),
        "virtual / ordinary": median_ratio(turns["virtual"], turns["ordinary"]),
        "virtual, half / ordinary": median_ratio(turns["virtual, half"], turns["ordinary"]),
    }
    return {
        "workload": name,
        "parameters": sum(each.numel() for each in net.parameters()),
        "samples_of_a_step": batch,
        "virtual_ranks": SLICES,
        "steps": {each: median(seconds) for each, seconds in turns.items()},
        **ratios,
    }


def shown(world: World, row: dict[str, Any]) -> dict[str, Any]:
    """Print a workload's row on rank 0, and return it."""
    if world.is_main:
        steps = "  ".join(f"{each} {1e3 * seconds:.2f}" for each, seconds in row["steps"].items())
        ratios = "  ".join(f"{each} {row[each]:.3f}" for each in row if "/" in each)
        print(f"{row['workload']}: {steps} ms\n    {ratios}", flush=True)
    return row


def main() -> None:
    """Measure every workload, and save the table."""
    parser = parser_of(__doc__, 15)
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--backend")
    options = parser.parse_args()
    with paceline.init(options.backend) as world:
        torch.set_num_threads(1)
        rows = [shown(world, measure(world, name, options.rounds)) for name in options.workloads]
        if world.is_main:
            print("kept in", save(f"same-bits-{dist.get_backend()}-{world.size}-ranks", rows))


if __name__ == "__main__":
    main()
