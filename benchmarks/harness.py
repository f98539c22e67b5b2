"""Code that benchmarks share: arguments, turns, ratios, clocks, the table on rank 0, and the dated results file.

Variants take turns in one run, and ratios are medians over rounds, because times alone mean little on a shared machine.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import date
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from paceline.core.host import cores
from paceline.tools.bench.measure import median_ratio as median_ratio
from paceline.tools.bench.measure import slowest_timed as slowest_timed
from paceline.tools.bench.measure import take_turns as take_turns
from paceline.tools.bench.measure import timed as timed

RESULTS = Path(__file__).parent / "results"
CLOCKS: dict[str, Callable[[], int]] = {
    "wall": time.perf_counter_ns,
    "thread": time.thread_time_ns,
    "process": time.process_time_ns,
}
"""Wall time, and CPU time of the calling thread and of the process. Thread time is the steadiest on shared cores."""
Clocks = dict[str, float]
"""Seconds by clock."""


def parser_of(doc: str, rounds: int | None = 11) -> argparse.ArgumentParser:
    """Return a parser with the help text `doc`. Unless `rounds` is None, it has the option ``--rounds``."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    if rounds is not None:
        parser.add_argument("--rounds", type=int, default=rounds, help="measured rounds; variants take turns in each")
    return parser


def report(table: Table, name: str, results: Any, ranks: int | None = None) -> None:
    """On rank 0, print the table and save the results."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        Console(width=120).print(table)
        print("kept in", save(name, results, ranks))


def save(name: str, results: Any, ranks: int | None = None) -> Path:
    """Write `results` to a dated file, and return its path; `ranks` defaults to the world size."""
    RESULTS.mkdir(exist_ok=True)
    today = date.today().isoformat()
    path = RESULTS / f"{today}-{name}.json"
    record = {
        "date": today,
        "machine": f"{platform.machine()}, {torch.get_num_threads()} thread(s) a rank, {cores()} cores",
        "torch": torch.__version__,
        "ranks": ranks or dist.get_world_size(),
        "results": results,
    }
    path.write_text(json.dumps(record, indent=1) + "\n")
    return path


def now() -> list[int]:
    """Read all clocks, in nanoseconds."""
    return [clock() for clock in CLOCKS.values()]


def between(began: Sequence[int], ended: Sequence[int]) -> list[int]:
    """Return the nanoseconds between two readings of the clocks."""
    return [end - begin for begin, end in zip(began, ended, strict=True)]


def medians(nanoseconds: Sequence[Sequence[int]]) -> Clocks:
    """Return the median of several durations in seconds, by clock."""
    columns = zip(*nanoseconds, strict=True)
    return {name: 1e-9 * statistics.median(column) for name, column in zip(CLOCKS, columns, strict=True)}


@contextmanager
def without_collections() -> Iterator[None]:
    """Disable garbage collection in the block, because pauses would affect the variants unequally."""
    gc.disable()
    yield
    gc.enable()
    gc.collect()
