"""Timing shared by the benchmarks: variants take turns in one run, and ratios are of medians over the rounds.

The machines are shared and noisy, so a bare time says little; what was measured side by side can be compared.
"""

from __future__ import annotations

import json
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

RESULTS = Path(__file__).parent / "results"


def timed(run: Callable[[], Any], repeat: int) -> float:
    """Seconds per call, all ranks starting together; the slowest rank's counts."""
    dist.barrier()
    start = time.perf_counter()
    for _ in range(repeat):
        run()
    seconds = torch.tensor((time.perf_counter() - start) / repeat, dtype=torch.float64)
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    return float(seconds)


def take_turns(variants: Mapping[str, Callable[[], Any]], rounds: int, repeat: int) -> dict[str, list[float]]:
    """Seconds per call of each variant in each round: `repeat` calls in a row, between barriers, in turn."""
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for round_ in range(rounds + 1):
        for name, run in variants.items():
            dist.barrier()
            start = time.perf_counter()
            for _ in range(repeat):
                run()
            elapsed = (time.perf_counter() - start) / repeat
            if round_:  # the first round warms up
                seconds[name].append(elapsed)
    return seconds


def median_ratio(numerator: Sequence[float], denominator: Sequence[float]) -> float:
    """The median over the rounds of one variant's time over another's."""
    return statistics.median(a / b for a, b in zip(numerator, denominator, strict=True))


def save(name: str, results: Any, ranks: int | None = None) -> Path:
    """Keep `results` of `ranks` ranks (by default those of the process group) under today's date, with the machine."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{date.today().isoformat()}-{name}.json"
    where = {
        "machine": f"{platform.machine()}, {torch.get_num_threads()} thread(s) a rank, {_cores()} cores",
        "torch": torch.__version__,
        "ranks": ranks or dist.get_world_size(),
    }
    path.write_text(json.dumps({"date": date.today().isoformat(), **where, "results": results}, indent=1) + "\n")
    return path


def _cores() -> int:
    import os

    return len(os.sched_getaffinity(0))
