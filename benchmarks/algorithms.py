"""The collective algorithms over send and receive beside Gloo's own collectives and our group's, in one run.

The model of ``paceline.comm.algorithms.cost`` is fitted to the medians of all algorithms from 64 KB up, and stands
beside them.
Run by: paceline run --nproc 2 benchmarks/algorithms.py --help (then with --nproc 4)
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

import paceline
from measure import median_ratio, save, timed
from paceline.comm import algorithms
from paceline.comm.algorithms import NAMES, build
from paceline.comm.algorithms.cost import Sample, fit

SIZES = (4096, 65536, 1_048_576, 4_194_304, 26_214_400)
"""Bytes of a float32 tensor; 26,214,400 is the 25 MB of torch DDP's buckets."""
FITTED_FROM = 65536


def variants(tensor: torch.Tensor, gloo: Any) -> dict[str, Callable[[], Any]]:
    """What is measured, by name: each of the algorithms over Gloo's messages, and what there was before them."""
    every: dict[str, Callable[[], Any]] = {
        name: partial(getattr(algorithms, name), tensor, group=gloo, check=False) for name in NAMES
    }
    hosts = [rank * 2 // dist.get_world_size() for rank in range(dist.get_world_size())]
    every["hierarchical_all_reduce"] = partial(
        algorithms.hierarchical_all_reduce, tensor, group=gloo, hosts=hosts, check=False
    )
    every["ring_all_reduce, checked"] = partial(algorithms.ring_all_reduce, tensor, group=gloo)
    every["gloo all_reduce"] = partial(dist.all_reduce, tensor, group=gloo)
    every["gloo broadcast"] = partial(dist.broadcast, tensor, 0, group=gloo)
    every["paceline all_reduce"] = partial(dist.all_reduce, tensor)
    every["paceline broadcast"] = partial(dist.broadcast, tensor, 0)
    return every


def measure(size: int, rounds: int, gloo: Any) -> dict[str, list[float]]:
    """Seconds per call of each variant in each round; variants take turns."""
    tensor = torch.zeros(size // 4)  # zeros stay zeros, however often they are summed
    repeat = max(2, min(100, 10_000_000 // size))
    every = variants(tensor, gloo)
    seconds: dict[str, list[float]] = {name: [] for name in every}
    for round_ in range(rounds + 1):
        for name, run in every.items():
            elapsed = timed(run, repeat)
            if round_:  # the first round warms up
                seconds[name].append(elapsed)
    return seconds


def schedule_of(name: str, ranks: int) -> algorithms.Schedule:
    """As measured: the hierarchical one takes the ranks for those of two hosts."""
    return build(name, ranks, hosts=[rank * 2 // ranks for rank in range(ranks)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="bytes")
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    world = paceline.init("paceline")
    gloo = dist.new_group(backend="gloo")
    took = {size: measure(size, options.rounds, gloo) for size in options.sizes}

    medians = {size: {name: statistics.median(all_) for name, all_ in one.items()} for size, one in took.items()}
    samples = [
        Sample(schedule_of(name, world.size), size, medians[size][name])
        for size in options.sizes
        if size >= FITTED_FROM
        for name in NAMES
    ]
    model = fit(samples, cores=len(os.sched_getaffinity(0)))
    network = fit(samples)
    console = Console(width=110)
    results: dict[str, Any] = {"model": model._asdict(), "model without cores": network._asdict()}
    for size in options.sizes:
        table = Table("", "ms", "model ms", "model / measured", "× Gloo's own", title=f"{size:,} bytes")
        results[str(size)] = {}
        for name, all_ in took[size].items():
            peer = "gloo broadcast" if "broadcast" in name else "gloo all_reduce"
            row = {"ms": 1000 * statistics.median(all_), "/ gloo": median_ratio(all_, took[size][peer])}
            if name in NAMES:
                row["model ms"] = 1000 * model.seconds(schedule_of(name, world.size), size)
                row["without cores ms"] = 1000 * network.seconds(schedule_of(name, world.size), size)
            results[str(size)][name] = {key: round(value, 4) for key, value in row.items()}
            predicted = row.get("model ms")
            table.add_row(
                name,
                f"{row['ms']:.3f}",
                f"{predicted:.3f}" if predicted else "-",
                f"{predicted / row['ms']:.2f}" if predicted else "-",
                f"{row['/ gloo']:.2f}",
            )
        if world.is_main:
            console.print(table)
    if world.is_main:
        print(model)
        print(network)
        print("kept in", save(f"algorithms-{world.size}-ranks", results))
    world.close()


if __name__ == "__main__":
    main()
