"""A rank's work in ``paceline bench collectives``: every variant is checked once, then they take turns."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from torch import Tensor

from paceline.core.processes.world import init
from paceline.errors import PacelineError
from paceline.launch.pinning import cores
from paceline.tools.bench.backends import Variant, own_part, release, variants
from paceline.tools.bench.bench_config import ELEMENT, BenchConfig
from paceline.tools.bench.report import report
from paceline.tools.bench.rows import Row, fitted
from paceline.tools.bench.turns import slowest_timed, take_turns

BYTES_A_TURN = 8_000_000
"""Bytes that the calls of a turn move, about; a small tensor takes many calls."""
CALLS = 100
"""Most calls in a turn."""
ROUNDS = 7
"""Turns that each variant takes; the median counts."""


def main(config_json: str) -> None:
    """Measure on this rank, and report on rank 0."""
    config = BenchConfig.from_json(config_json)
    with init("paceline") as world:
        # Paceline's algorithms and Gloo's run on the same group, so that only the algorithm differs.
        gloo = dist.new_group(backend="gloo")
        rows: list[Row] = []
        console = Console(file=sys.stderr)  # so that the table on stdout can be kept
        shows = world.is_main and console.is_terminal
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
        with Progress(*columns, console=console, transient=True, disable=not shows) as bar:
            task = bar.add_task("measuring", total=len(config.ops) * len(config.sizes))
            for op in config.ops:
                for size in config.sizes:
                    count = elements(op, size, world.size)
                    made = variants(op, count, config.backends, gloo)
                    rows += _measure(op, count, made, world.size)
                    # Shared memory is scarce, and the next size takes its own.
                    release(made)
                    bar.update(task, advance=1, description=f"{op} {count * ELEMENT:,} bytes")
        if world.is_main:
            host_cores = cores()
            model, rows = fitted(rows, host_cores)
            report(rows, model, host_cores, config)
    # Behind the block, because a world that is left by an error does not wait for the other ranks.
    if world.is_main and (wrong := sum(row.wrong for row in rows)):
        raise PacelineError(f"{wrong} elements came out wrong; the column 'wrong' says where")


def elements(op: str, nbytes: int, ranks: int) -> int:
    """Return the elements of a tensor of about `nbytes` that ranks can cut into equal parts, where `op` needs that."""
    count = nbytes // ELEMENT
    return -(-count // ranks) * ranks if op in ("reduce_scatter", "all_gather") else count


def _measure(op: str, count: int, made: Sequence[Variant], ranks: int) -> list[Row]:
    """Check every variant, then measure them; returns a row for each."""
    wrong = {variant.name: _wrong(op, count, variant) for variant in made}
    calls = max(1, min(CALLS, BYTES_A_TURN // (count * ELEMENT)))
    # No further warm-up: the check has run each variant once.
    seconds = take_turns({variant.name: partial(_turn, variant, calls) for variant in made}, ROUNDS, warm_up=0)
    return [
        Row(op, each.name, each.schedule, ranks, count * ELEMENT, tuple(seconds[each.name]), wrong[each.name])
        for each in made
    ]


def _turn(variant: Variant, calls: int) -> float:
    # Just written, because gradients are, too. Zeros, because sums of sums would not stay finite.
    variant.source.zero_()
    return slowest_timed(variant.run, calls)


def _wrong(op: str, count: int, variant: Variant) -> int:
    """Return how many elements of all ranks' results are wrong, with small whole numbers, which are summed exactly."""
    rank, size = dist.get_rank(), dist.get_world_size()
    variant.load(_values(count, rank))
    variant.run()
    wrong = torch.zeros((), dtype=torch.int64)
    if op != "reduce" or rank == 0:
        wrong += (variant.result != _right(op, count, rank, size)).sum()
    dist.all_reduce(wrong)
    return int(wrong)


def _values(count: int, rank: int) -> Tensor:
    return (torch.arange(count) % 7 + rank).float()


def _right(op: str, count: int, rank: int, size: int) -> Tensor:
    if op == "broadcast":
        return _values(count, 0)
    if op == "all_gather":
        return torch.arange(count).remainder(7).add(torch.arange(count) // (count // size)).float()
    total = sum((_values(count, other) for other in range(size)), torch.zeros(count))
    return total[own_part(count)] if op == "reduce_scatter" else total
