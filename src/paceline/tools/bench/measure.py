"""One rank of ``paceline bench collectives``: checks every variant once, then times them in turns."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.comm.algorithms import Members, execute
from paceline.comm.process_group import PacelineProcessGroup
from paceline.comm.schedules import build
from paceline.core.host import cores
from paceline.core.messages import say
from paceline.core.world import init
from paceline.errors import PacelineError
from paceline.tools.bench.bench_command import ELEMENT, BenchConfig
from paceline.tools.bench.report import Row, report

OURS: dict[str, tuple[str, ...]] = {
    "all_reduce": ("ring_all_reduce", "tree_all_reduce", "halving_doubling_all_reduce"),
    "broadcast": ("linear_broadcast", "tree_broadcast", "scatter_all_gather_broadcast"),
    "reduce": ("linear_reduce", "tree_reduce"),
}
"""Paceline's algorithms for each collective. A function and its schedule have the same name."""
ZERO_COPY = "paceline zero-copy"
"""All-reduce of a tensor that is already in the group's shared memory, like the reducer's buckets."""
Measurement = TypeVar("Measurement")
BYTES_A_TURN = 8_000_000
"""Approximate bytes per turn. A turn with small tensors therefore has many calls."""
CALLS = 100
"""Maximum number of calls in a turn."""
ROUNDS = 7
"""Number of turns of each variant. The median turn is reported."""


@dataclass(frozen=True)
class Variant:
    """An implementation of a collective, with its tensor for one size."""

    name: str
    """Name in the table: ``"ring"``, ``"gloo"``, ``"paceline"``."""
    tensor: Tensor
    """Input and output of this rank."""
    run: Callable[[], object]
    """Run the collective once."""


@contextmanager
def variants(op: str, count: int, gloo: Any) -> Iterator[list[Variant]]:
    """Yield the implementations of `op` on `count` float32 values; `gloo` is a Gloo group of all ranks."""
    entries = [_ours(op, name, torch.zeros(count, dtype=torch.float32, device="cpu"), gloo) for name in OURS[op]]
    entries.append(_of_group(op, "gloo", torch.zeros(count, dtype=torch.float32, device="cpu"), gloo))
    entries.append(_of_group(op, "paceline", torch.zeros(count, dtype=torch.float32, device="cpu"), None))
    group = dist.group.WORLD
    with ExitStack() as stack:
        if op == "all_reduce" and isinstance(group, PacelineProcessGroup) and group.native:
            shared = group.allocate(count, torch.float32)
            stack.callback(group.free, shared)
            entries.append(_of_group(op, ZERO_COPY, shared, None))
        yield entries


def _ours(op: str, name: str, tensor: Tensor, gloo: Any) -> Variant:
    members = Members(gloo)
    schedule = build(name, members.size)
    short = name.removesuffix(f"_{op}").replace("_", "-")
    # Do not call the public functions, which also compare arguments between ranks; this would be timed too.
    return Variant(short, tensor, lambda: execute(schedule, tensor, members))


def _of_group(op: str, name: str, tensor: Tensor, group: Any) -> Variant:
    """Return the collective `op` of `group`."""
    calls: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: dist.all_reduce(tensor, group=group),
        "broadcast": lambda: dist.broadcast(tensor, 0, group=group),
        "reduce": lambda: dist.reduce(tensor, 0, group=group),
    }
    return Variant(name, tensor, calls[op])


def take_turns(
    turns: Mapping[str, Callable[[], Measurement]], rounds: int, *, warm_up: int = 1, rotated: bool = False
) -> dict[str, list[Measurement]]:
    """Run every variant once per round, and return the measurements by variant.

    Variants take turns, and only times of the same round are compared, so the comparison is fair on a noisy machine.

    Args:
        turns: a function for each variant that runs one turn and returns its measurement.
        rounds: number of measured rounds.
        warm_up: number of unmeasured rounds before the measured ones.
        rotated: start each round with the next variant instead of the first.
    """
    measurements: dict[str, list[Measurement]] = {name: [] for name in turns}
    names = list(turns)
    for round_ in range(rounds + warm_up):
        first = round_ % len(names) if rotated else 0
        for name in names[first:] + names[:first]:
            measurement = turns[name]()
            if round_ >= warm_up:
                measurements[name].append(measurement)
    return measurements


def timed(run: Callable[[], Any], calls: int) -> float:
    """Return the seconds per call of `run` on this rank. All ranks start together."""
    dist.barrier()
    start = time.perf_counter()
    for _ in range(calls):
        run()
    return (time.perf_counter() - start) / calls


def slowest_timed(run: Callable[[], Any], calls: int) -> float:
    """Return the seconds per call of `run` on the slowest rank. All ranks start together."""
    seconds = torch.tensor(timed(run, calls), dtype=torch.float64, device="cpu")
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    return float(seconds)


def median_ratio(numerator: Sequence[float], denominator: Sequence[float]) -> float:
    """Return the median ratio of two variants' times in the same round."""
    return statistics.median(a / b for a, b in zip(numerator, denominator, strict=True))


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
                count = size // ELEMENT
                with variants(op, count, gloo) as compared:
                    rows += _measure(op, count, compared, world.size)
        if world.is_main:
            report(rows, cores(), config)
    # Raise after the block, because a rank that leaves the world with an error does not wait for the others.
    if world.is_main and (wrong := sum(row.wrong for row in rows)):
        raise PacelineError(f"{wrong} elements have wrong values; see the column '#wrong'")


def _measure(op: str, count: int, compared: Sequence[Variant], ranks: int) -> list[Row]:
    """Check every variant, then time them. Return a row for each."""
    wrong = {variant.name: _wrong(op, count, variant) for variant in compared}
    calls = max(1, min(CALLS, BYTES_A_TURN // (count * ELEMENT)))
    # No warm-up, because the check has already run each variant.
    seconds = take_turns({variant.name: partial(_turn, variant, calls) for variant in compared}, ROUNDS, warm_up=0)
    return [Row(op, v.name, ranks, count * ELEMENT, tuple(seconds[v.name]), wrong[v.name]) for v in compared]


def _turn(variant: Variant, calls: int) -> float:
    # Write the tensor just before use, as backward does. Use zeros, because repeated sums would overflow.
    variant.tensor.zero_()
    return slowest_timed(variant.run, calls)


def _wrong(op: str, count: int, variant: Variant) -> int:
    """Return the number of wrong elements on all ranks. The test values are small integers, whose sums are exact."""
    rank = dist.get_rank()
    variant.tensor.copy_(_values(count, rank))
    variant.run()
    wrong = torch.zeros((), dtype=torch.int64, device="cpu")
    if op != "reduce" or rank == 0:
        wrong += (variant.tensor != _right(op, count)).sum()
    dist.all_reduce(wrong)
    return int(wrong)


def _values(count: int, rank: int) -> Tensor:
    return (torch.arange(count, device="cpu") % 7 + rank).float()


def _right(op: str, count: int) -> Tensor:
    senders = range(1 if op == "broadcast" else dist.get_world_size())
    return sum((_values(count, peer) for peer in senders), torch.zeros(count, dtype=torch.float32, device="cpu"))
