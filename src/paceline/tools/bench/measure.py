"""One rank of ``paceline bench collectives``: checks every variant once, then times them in turns."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.core.output.messages import say
from paceline.core.processes.world import init
from paceline.errors import PacelineError
from paceline.launch.host_limits import cores
from paceline.tools.bench.backends import Variant, part_of_rank, variants
from paceline.tools.bench.bench_config import ELEMENT, BenchConfig
from paceline.tools.bench.report import report
from paceline.tools.bench.rows import Row
from paceline.tools.bench.turns import slowest_timed, take_turns

BYTES_A_TURN = 8_000_000
"""Approximate bytes per turn. A turn with small tensors therefore has many calls."""
CALLS = 100
"""Maximum number of calls in a turn."""
ROUNDS = 7
"""Number of turns of each variant. The median turn is reported."""


def main(config_json: str) -> None:
    """Measure on this rank, and report on rank 0."""
    config = BenchConfig.from_json(config_json)
    with init("paceline") as world:
        # Run Paceline's algorithms and Gloo's on the same group, so that only the algorithm differs.
        gloo = dist.new_group(backend="gloo")
        rows: list[Row] = []
        for op in config.ops:
            if world.is_main:
                say(f"measuring {op}")
            for size in config.sizes:
                count = elements(op, size, world.size)
                with variants(op, count, gloo) as compared:
                    rows += _measure(op, count, compared, world.size)
        if world.is_main:
            report(rows, cores(), config)
    # Raise after the block, because a rank that leaves the world with an error does not wait for the others.
    if world.is_main and (wrong := sum(row.wrong for row in rows)):
        raise PacelineError(f"{wrong} elements have wrong values; see the column '#wrong'")


def elements(op: str, nbytes: int, ranks: int) -> int:
    """Return the number of elements of a tensor of about `nbytes`, divisible by `ranks` if `op` requires it."""
    count = nbytes // ELEMENT
    return -(-count // ranks) * ranks if op in ("reduce_scatter", "all_gather") else count


def _measure(op: str, count: int, compared: Sequence[Variant], ranks: int) -> list[Row]:
    """Check every variant, then time them. Return a row for each."""
    wrong = {variant.name: _wrong(op, count, variant) for variant in compared}
    calls = max(1, min(CALLS, BYTES_A_TURN // (count * ELEMENT)))
    # No warm-up, because the check has already run each variant.
    seconds = take_turns({variant.name: partial(_turn, variant, calls) for variant in compared}, ROUNDS, warm_up=0)
    return [Row(op, v.name, ranks, count * ELEMENT, tuple(seconds[v.name]), wrong[v.name]) for v in compared]


def _turn(variant: Variant, calls: int) -> float:
    # Write the tensor just before use, as backward does. Use zeros, because repeated sums would overflow.
    variant.source.zero_()
    return slowest_timed(variant.run, calls)


def _wrong(op: str, count: int, variant: Variant) -> int:
    """Return the number of wrong elements on all ranks. The test values are small integers, whose sums are exact."""
    rank = dist.get_rank()
    variant.load(_values(count, rank))
    variant.run()
    wrong = torch.zeros((), dtype=torch.int64, device="cpu")
    if op != "reduce" or rank == 0:
        wrong += (variant.result != _right(op, count)).sum()
    dist.all_reduce(wrong)
    return int(wrong)


def _values(count: int, rank: int) -> Tensor:
    return (torch.arange(count, device="cpu") % 7 + rank).float()


def _right(op: str, count: int) -> Tensor:
    size = dist.get_world_size()
    if op == "broadcast":
        return _values(count, 0)
    if op == "all_gather":
        return _values(count, 0) + torch.arange(count, device="cpu") // (count // size)
    total = sum((_values(count, peer) for peer in range(size)), torch.zeros(count, dtype=torch.float32, device="cpu"))
    return total[part_of_rank(count)] if op == "reduce_scatter" else total
