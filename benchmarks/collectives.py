"""All-reduce through shared memory, compared with Gloo, Open MPI (if installed) and the speed of the memory.

``make bench-mpi`` installs Open MPI and mpi4py and runs this with them. The limit is the time for a rank's share of the
memory accesses: reading its part of every rank's tensor, and writing the result to every rank's tensor.
Run by ``make bench``, or: paceline run --nproc 2 benchmarks/collectives.py --help
"""

from __future__ import annotations

import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.table import Table
from torch import Tensor

import paceline
from harness import median_ratio, parser_of, report, slowest_timed, take_turns
from paceline.comm.c10d.process_group import PacelineProcessGroup

SIZES = (4, 4096, 65536, 1_000_000, 26_214_400, 104_857_600)
"""Bytes of a float32 tensor; 26,214,400 is the 25 MB of torch DDP's buckets."""
MPI_SCRIPT = Path(__file__).with_name("mpi_all_reduce.py")


def memory_limit(shared: list[Tensor], rank: int) -> Callable[[], None]:
    """Return the minimum work of such an all-reduce: read one share of every tensor, and write it to every tensor."""
    count = shared[0].numel()
    share = slice(rank * count // len(shared), (rank + 1) * count // len(shared))
    parts = [tensor[share] for tensor in shared]
    piece_count = 131072  # half a megabyte, which fits into the cache

    def run() -> None:
        for start in range(0, parts[0].numel(), piece_count):
            pieces = [part[start : start + piece_count] for part in parts]
            for other in pieces[1:]:
                pieces[0].add_(other)
            for other in pieces[1:]:
                other.copy_(pieces[0])

    return run


def mpi_seconds(size: int, ranks: int, repeat: int) -> float:
    """Measure the seconds per call of Open MPI's in-place all-reduce, while the other ranks sleep."""
    command = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", str(ranks), sys.executable, str(MPI_SCRIPT)]
    done = subprocess.run([*command, str(size), str(repeat)], capture_output=True, text=True, check=True, timeout=120)
    return float(done.stdout.split()[-1])


def measure(size: int, rounds: int, gloo: Any, with_mpi: bool) -> dict[str, list[float]]:
    """Measure the seconds per call of each variant in each round; `gloo` is an additional Gloo group."""
    world = paceline.init()
    group = dist.distributed_c10d._get_default_group()
    assert isinstance(group, PacelineProcessGroup)
    count = size // 4
    ordinary, other = torch.ones(count), torch.ones(count)
    shared = group.allocate(count, torch.float32)
    private = [torch.ones(count) for _ in range(world.size)]
    variants: dict[str, tuple[list[Tensor], Callable[[], Any]]] = {
        "gloo": ([other], lambda: dist.all_reduce(other, group=gloo)),
        "ordinary": ([ordinary], lambda: dist.all_reduce(ordinary)),
        "zero copy": ([shared], lambda: dist.all_reduce(shared)),
        "limit": (private, memory_limit(private, world.rank)),
    }
    repeat = max(5, min(200, 20_000_000 // size))

    def turn(operands: list[Tensor], run: Callable[[], Any]) -> float:
        for tensor in operands:  # write each tensor just before use, as backward does
            tensor.fill_(1)
        return slowest_timed(run, repeat)

    def mpi_turn() -> float:
        seconds = torch.zeros((), dtype=torch.float64)
        if world.is_main:
            seconds.fill_(mpi_seconds(size, world.size, repeat))
        dist.broadcast(seconds, src=0)
        return float(seconds)

    turns: dict[str, Callable[[], float]] = {name: partial(turn, *variant) for name, variant in variants.items()}
    if with_mpi:
        turns["open mpi"] = mpi_turn
    seconds = take_turns(turns, rounds)
    group.free(shared)
    return seconds


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="bytes")
    options = parser.parse_args()
    world = paceline.init("paceline")
    gloo = dist.new_group(backend="gloo")
    with_mpi = shutil.which("mpirun") is not None and find_spec("mpi4py") is not None
    title = f"all-reduce, float32, {world.size} ranks: times as fast as"
    table = Table("bytes", "zero copy ms", "Gloo", "Open MPI", "limit", "| ordinary: Gloo", title=title)
    results = {}
    for size in options.sizes:
        seconds = measure(size, options.rounds, gloo, with_mpi)
        row: dict[str, float] = {f"{name} ms": 1000 * statistics.median(took) for name, took in seconds.items()}
        for ours in ("zero copy", "ordinary"):
            for name in seconds:
                if name != ours:
                    row[f"{name} / {ours}"] = median_ratio(seconds[name], seconds[ours])
        results[str(size)] = {name: round(value, 4) for name, value in row.items()}
        table.add_row(
            f"{size:,}",
            f"{row['zero copy ms']:.3f}",
            f"{row['gloo / zero copy']:.2f}",
            f"{row['open mpi / zero copy']:.2f}" if with_mpi else "-",
            f"{row['limit / zero copy']:.2f}",
            f"{row['gloo / ordinary']:.2f}",
        )
    report(table, f"collectives-{world.size}-ranks", results)
    world.close()


if __name__ == "__main__":
    main()
