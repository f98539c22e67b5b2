"""Promise: every algorithm gives the float64 sum, exactly for integers, with the same bits on every rank."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ReduceOp

from insides import NAMES, bounds, build
from paceline import World
from paceline.comm import algorithms
from threads import ThreadRanks
from twins import Pools

ALL_REDUCES = [name for name in NAMES if name.endswith("all_reduce")]


@functools.cache
def operand(rank: int, count: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(77 * count + rank)
    if dtype.is_floating_point:
        return torch.randn(count, generator=generator, dtype=torch.float64).to(dtype)
    return torch.randint(-(2**40), 2**40, (count,), generator=generator)


def lengths(size: int) -> dict[torch.dtype, list[int]]:
    """Return tensor lengths by dtype: edge cases for one float type and integers, an uneven length for the others."""
    short = {0, 1, size - 1, size, size + 1}
    every = {torch.float32: short | {65537}, torch.int64: short, torch.float64: {1031}, torch.bfloat16: {1031}}
    return {dtype: sorted(counts) for dtype, counts in every.items()}


def call(name: str, tensor: Tensor, group: Any, root: int) -> Tensor:
    """Run an algorithm, with `root` as its source or destination if it has one."""
    options: dict[str, Any] = {"group": group}
    if name in ("linear_reduce", "tree_reduce"):
        options["dst"] = root
    elif name.endswith("broadcast"):
        options["src"] = root
    elif name == "hierarchical_all_reduce":
        options["hosts"] = [rank // 2 for rank in range(group.size())]
    result = getattr(algorithms, name)(tensor, **options)
    return tensor if result is None else result


@functools.cache
def exact_sum(size: int, count: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the sum of the operands in double precision or int64, and the sum of their magnitudes."""
    wide = torch.float64 if dtype.is_floating_point else torch.int64
    stacked = torch.stack([operand(rank, count, dtype).to(wide) for rank in range(size)])
    return stacked.sum(0), stacked.abs().sum(0)


def check_results(name: str, results: list[Tensor], count: int, dtype: torch.dtype, root: int) -> None:
    """Check the `results` of all ranks for an algorithm that started from :func:`operand`."""
    size = len(results)
    operands = [operand(rank, count, dtype) for rank in range(size)]
    result = build(name, size).result
    where = f"{name} of {size} ranks, {count} × {dtype}"
    if result == "broadcast":
        assert all(torch.equal(output, operands[root]) for output in results), where
        return
    if result == "all-gather":
        parts = [operands[rank][bounds(count, size, rank)] for rank in range(size)]
        assert all(torch.equal(output, torch.cat(parts)) for output in results), where
        return
    total, slack = exact_sum(size, count, dtype)
    if result == "all-reduce":
        same = [output.view(torch.uint8) for output in results] if count else results
        assert all(torch.equal(output, same[0]) for output in same), f"{where}: ranks differ"
        assert_close(results[0], total, slack, size, where)
    elif result == "reduce":
        assert_close(results[root], total, slack, size, where)
    else:
        for rank, output in enumerate(results):
            mine = bounds(count, size, rank)
            assert_close(output, total[mine], slack[mine], size, where)


def assert_close(actual: Tensor, total: Tensor, slack: Tensor, size: int, where: str) -> None:
    if not actual.dtype.is_floating_point:
        assert torch.equal(actual, total), where
        return
    allowed = size * torch.finfo(actual.dtype).eps * slack
    assert actual.shape == total.shape, where
    assert bool(((actual.double() - total).abs() <= allowed).all()), where


def run_all_algorithms(group: Any, dtype: torch.dtype, counts: list[int]) -> list[Tensor]:
    """Return the results of all algorithms for all lengths on one rank."""
    return [
        call(name, operand(group.rank(), count, dtype).clone(), group, (count + 1) % group.size())
        for name in NAMES
        for count in counts
    ]


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2, 5, 8])
def test_every_algorithm_equals_the_sum_on_any_number_of_ranks(size: int) -> None:
    ranks = ThreadRanks(size)
    for dtype, counts in lengths(size).items():
        results = ranks.run(run_all_algorithms, dtype, counts)
        for index, (name, count) in enumerate((name, count) for name in NAMES for count in counts):
            check_results(name, [output[index] for output in results], count, dtype, (count + 1) % size)


def odd_values(group: Any, name: str) -> Tensor:
    """Reduce NaNs with rank-dependent payloads, infinities and zeros of both signs, and values that cancel."""
    tensor = operand(group.rank(), 100, torch.float32).clone()
    tensor[::7] *= 1e30 * (-1) ** group.rank()
    tensor[1::7] = float("inf") if group.rank() % 2 else float("-inf")
    tensor[2::7] = -0.0 if group.rank() else 0.0
    tensor.view(torch.int32)[3::7] = 0x7FC00001 + group.rank()
    return call(name, tensor, group, 0)


@pytest.mark.parametrize("size", [2, 5, 8])
def test_ranks_agree_to_the_bit_on_nan_infinity_and_cancellation(size: int) -> None:
    ranks = ThreadRanks(size)
    for name in ALL_REDUCES:
        bits = [output.view(torch.int32) for output in ranks.run(odd_values, name)]
        assert all(torch.equal(output, bits[0]) for output in bits), name


def check_reductions(group: Any) -> None:
    rank, size = group.rank(), group.size()
    expected = torch.arange(1.0, size + 1)
    for name in ALL_REDUCES:
        run = getattr(algorithms, name)
        for op, value in (
            (ReduceOp.AVG, expected.mean()),
            (ReduceOp.MAX, expected.max()),
            (ReduceOp.MIN, expected.min()),
            (ReduceOp.PRODUCT, expected.prod()),
        ):
            tensor = torch.full((3, 5), rank + 1.0)
            run(tensor, op=op, group=group)
            assert torch.equal(tensor, torch.full((3, 5), float(value))), (name, op)
        for dtype in (torch.complex64, torch.bool, torch.float16):
            tensor = torch.ones(5, dtype=dtype)
            run(tensor, group=group)
            assert torch.equal(tensor, torch.full((5,), size).to(dtype)), (name, dtype)
    tensor = torch.full((10,), rank + 1.0)
    mine = algorithms.ring_reduce_scatter(tensor, op=ReduceOp.AVG, group=group)
    assert torch.equal(mine, torch.full_like(mine, float(expected.mean())))
    assert mine.data_ptr() == tensor[bounds(10, size, rank)].data_ptr()
    tensor = torch.full((4,), rank + 1.0)
    algorithms.tree_reduce(tensor, dst=size - 1, op=ReduceOp.AVG, group=group)
    if rank == size - 1:
        assert torch.equal(tensor, torch.full((4,), float(expected.mean())))
    tensor = torch.full((4,), rank + 1.0)
    algorithms.linear_reduce(tensor, dst=0, group=group)
    assert torch.equal(tensor, torch.full((4,), float(expected.sum()) if rank == 0 else rank + 1.0))


def test_all_torch_reductions_and_dtypes() -> None:
    ThreadRanks(4).run(check_reductions)  # a power of two makes the average exact


# -- processes --------------------------------------------------------------------------------------------------------


def in_processes(world: World, dtype: torch.dtype, counts: list[int]) -> list[Tensor]:
    return run_all_algorithms(dist.group.WORLD, dtype, counts)


@pytest.mark.slow
def test_processes_and_threads_give_the_same_bits(pools: Pools) -> None:
    alone = ThreadRanks(3).run(run_all_algorithms, torch.float32, [0, 3, 1000])
    together = pools.run(3, in_processes, torch.float32, [0, 3, 1000])
    for threads, ranks in zip(alone, together, strict=True):
        assert all(map(torch.equal, threads, ranks))
