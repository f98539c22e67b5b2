"""One rank of the trainings that ``planner.py`` predicts: it is profiled, or times variants that train in turns."""

from __future__ import annotations

import argparse
import json
import statistics
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

import paceline
from paceline import compression
from paceline.optim import ShardedOptimizer
from paceline.profiler import profile
from workloads import WORKLOADS

WARM_UP = 3
"""Steps of a new wrapper that are not timed; buckets are laid out again after the first one."""


def train(workload: str, rows: int, variant: dict[str, Any], steps: int) -> list[float]:
    """Train a new model, and return the seconds of each step after the first ones.

    Args:
        workload: name of the model.
        rows: batch size as a multiple of the workload's.
        variant: ``bucket_cap_mb``, ``accumulate``, ``hook`` (name of a compressor), ``sharded``.
        steps: number of steps to time.
    """
    made = WORKLOADS[workload]
    torch.manual_seed(0)
    model = paceline.DistributedDataParallel(made.build(), bucket_cap_mb=variant.get("bucket_cap_mb"))
    if hook := variant.get("hook"):
        model.register_comm_hook(getattr(compression, hook)(model), compression.hook)
    settings: Any = {"lr": 1e-4, "fused": True}
    optimizer: torch.optim.Optimizer = (
        ShardedOptimizer(model, torch.optim.AdamW, **settings)
        if variant.get("sharded")
        else torch.optim.AdamW(model.parameters(), **settings)
    )
    torch.manual_seed(1 + dist.get_rank())
    batches = [made.batch() for _ in range(rows)]
    x, y = (torch.cat(parts) for parts in zip(*batches, strict=True))
    times = []
    for _ in range(WARM_UP + steps):
        began = time.perf_counter()
        for left in reversed(range(variant.get("accumulate", 1))):
            with model.no_sync() if left else nullcontext():
                F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        times.append(time.perf_counter() - began)
    return times[WARM_UP:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("settings", help="JSON: backend, workload, rows, steps, and profile or rounds, variants, out")
    settings = json.loads(parser.parse_args().settings)
    world = paceline.init(backend=settings["backend"], timeout=300)
    torch.set_num_threads(1)
    # The model memorizes its batch. Its gradients then become denormal, which made a step up to five times as long.
    torch.set_flush_denormal(True)
    common = settings["workload"], settings["rows"]
    if folder := settings.get("profile"):
        with profile(folder, operators=False):
            train(*common, settings["variant"], settings["steps"])
    else:
        times: dict[str, list[float]] = {name: [] for name in settings["variants"]}
        for _ in range(settings["rounds"]):
            for name, variant in settings["variants"].items():
                dist.barrier()
                times[name].append(statistics.median(train(*common, variant, settings["steps"])))
        if world.rank == 0:
            Path(settings["out"]).write_text(json.dumps(times))
    world.close()


if __name__ == "__main__":
    main()
