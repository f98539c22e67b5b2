"""Cost of ``check_compute_every=k``, which computes some slices twice: steps with and without it, in turns.

    paceline run --nproc 2 benchmarks/compute_check.py

Uses the small GPT and the small MLP of ``same_bits.py``, with its eight slices per step. A turn has as many steps as
the largest k, so each k has the same number of checks in each turn. A check computes one more slice on the slowest
rank, sends a batch, and hashes gradients on two ranks. In the first step, every rank repeats a slice three times; this
step runs before the turns.

Times are medians over turns on the slowest rank. Ratios are computed within each round; the median is reported.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

import paceline
from harness import median_ratio, parser_of, save, take_turns
from paceline.core.world import World
from same_bits import SLICES, WORKLOADS, Variant, shown

EVERY = (1, 10, 100)


def measure(world: World, name: str, rounds: int, intervals: Sequence[int]) -> dict[str, Any]:
    """Measure steps of a workload without checks, and with one in every k steps."""
    torch.manual_seed(0)
    build, batch = WORKLOADS[name]
    net, data = build()
    steps = max(intervals)
    variants = {"without": Variant(net, data, batch, SLICES, steps=steps)}
    variants |= {f"k={every}": Variant(net, data, batch, SLICES, check=every, steps=steps) for every in intervals}
    turns = take_turns({each: variant.turn for each, variant in variants.items()}, rounds, rotated=True, warm_up=0)
    return {
        "workload": name,
        "samples_of_a_step": batch,
        "virtual_ranks": SLICES,
        "slices_of_a_rank": SLICES // world.size,
        "steps": {each: median(seconds) for each, seconds in turns.items()},
        **{f"k={every} / without": median_ratio(turns[f"k={every}"], turns["without"]) for every in intervals},
    }


def main() -> None:
    """Measure every workload, and save the table."""
    parser = parser_of(__doc__, 5)
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--every", nargs="+", type=int, default=EVERY, metavar="K")
    options = parser.parse_args()
    with paceline.init() as world:
        torch.set_num_threads(1)
        rows = [shown(world, measure(world, name, options.rounds, options.every)) for name in options.workloads]
        if world.is_main:
            names = "-".join(options.workloads)
            print("kept in", save(f"compute-check-{names}-{dist.get_backend()}-{world.size}-ranks", rows))


if __name__ == "__main__":
    main()
