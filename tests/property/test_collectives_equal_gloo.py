"""Promise: every collective equals Gloo's, and sums have the bits of a fixed summation order."""

from __future__ import annotations

import functools
import time
import warnings
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed import ReduceOp

from drawn import draws
from insides import STAGE_BYTES, Handle
from paceline import World
from twins import Pools

FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
INTEGERS = (torch.int64, torch.int32, torch.int8, torch.uint8)
COMPLEX = (torch.complex64, torch.complex128)
EVERY = (*FLOATS, *INTEGERS, *COMPLEX, torch.bool)
ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 5e-2, torch.float16: 1e-2, torch.complex64: 1e-5}
REDUCTIONS = [
    *((name, dtype) for name in ("SUM", "AVG", "PRODUCT", "MIN", "MAX") for dtype in FLOATS),
    *((name, dtype) for name in ("SUM", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR") for dtype in INTEGERS),
    *((name, dtype) for name in ("SUM", "AVG") for dtype in COMPLEX),
    *((name, torch.bool) for name in ("SUM", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")),
]
LAYOUTS = ("plain", "transposed", "strided", "requires grad", "0-dim", "inference")
# Torch 2.13 renamed these functions and deprecated the old names.
all_gather_into = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
reduce_scatter_from = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
WAYS = ("sync", "async", "future", "polled")
no_shrinking = draws(15, shrinks=False)


@functools.cache
def gloo() -> dist.ProcessGroup:
    """Return a Gloo group beside the backend under test, created once per rank."""
    return dist.new_group(backend="gloo")


def values(seed: int, rank: int, count: int, dtype: torch.dtype) -> Tensor:
    """Return the reproducible inputs of `rank`, which repeat after a prime number of elements."""
    if count > 4099:
        return values(seed, rank, 4099, dtype).repeat(-(-count // 4099))[:count]
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    if dtype is torch.bool:
        return torch.randint(0, 2, (count,), generator=generator).bool()
    if dtype.is_complex:
        return torch.randn(count, 2, generator=generator, dtype=torch.float64).view(torch.complex128)[:, 0].to(dtype)
    if dtype.is_floating_point:
        return torch.randn(count, generator=generator, dtype=torch.float64).to(dtype)
    return torch.randint(0 if dtype is torch.uint8 else -9, 9, (count,), generator=generator).to(dtype)


def shaped(flat: Tensor, layout: str) -> Tensor:
    """Copy numbers into a new tensor of another layout."""
    count = flat.numel()
    if layout == "transposed" and count % 2 == 0:
        return flat.view(2, -1).t().contiguous().t()
    if layout == "strided":
        return flat.new_zeros(count, 3)[:, 1].copy_(flat)
    if layout == "requires grad" and (flat.is_floating_point() or flat.is_complex()):
        return flat.clone().requires_grad_()
    if layout == "0-dim" and count == 1:
        return flat.clone().view(())
    if layout == "inference":
        with torch.inference_mode():
            return flat.clone()
    return flat.clone()


def finish(way: str, work: Any) -> None:
    """Wait for a collective in one of c10d's ways."""
    if way == "sync":
        assert work is None
        return
    if way == "future":
        work.get_future().wait()
    while way == "polled" and not work.is_completed():
        time.sleep(0.0002)
    work.wait()
    assert work.is_completed() or not isinstance(work, Handle)  # Gloo does not report completion after a wait


def assert_same(ours: Any, other: Any, what: str, rounds: bool = False) -> None:
    """Compare bitwise, or up to rounding if sums may have a different order."""
    for mine, gloos in zip(ours, other, strict=True):
        tolerance = ROUNDING.get(mine.dtype, 1e-12) if rounds else 0.0
        torch.testing.assert_close(
            mine.detach(),
            gloos.detach().view_as(mine),
            rtol=tolerance,
            atol=tolerance,
            equal_nan=True,
            msg=lambda m: f"{what}: {m}",
        )


# -- reductions --------------------------------------------------------------------------------------------------------


def run_reductions(world: World, cases: list[Any]) -> None:
    for seed, (kind, (name, dtype), count, form, way) in enumerate(cases):
        op = getattr(ReduceOp, name)
        asynchronous = way != "sync"
        results: list[list[Tensor]] = []
        for group, layout in ((None, form), (gloo(), "plain")):  # Gloo silently ignores strides
            mine = shaped(values(seed, world.rank, count, dtype), layout)
            everyone = [shaped(values(seed + 50 * i, world.rank, count, dtype), layout) for i in range(world.size)]
            if kind == "all_reduce":
                work = dist.all_reduce(mine, op, group, asynchronous)
                result = [mine]
            elif kind == "reduce_scatter":
                result = [torch.empty_like(mine)]
                work = dist.reduce_scatter(result[0], everyone, op, group, asynchronous)
            else:
                result = [torch.empty(count, dtype=dtype)]
                whole = torch.cat([tensor.detach().reshape(-1) for tensor in everyone])
                work = reduce_scatter_from(result[0], whole, op, group, asynchronous)
            finish(way if group is None or way == "sync" else "async", work)  # not all Gloo works have futures
            results.append(result)
        what = f"rank {world.rank} of {world.size}: {cases[seed]}"
        assert_same(*results, what, rounds=dtype.is_floating_point or dtype.is_complex)


counts = st.one_of(
    st.sampled_from([0, 1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65]),
    st.integers(0, 3000),
    st.sampled_from([STAGE_BYTES // 8 + d for d in (-1, 0, 1)] + [STAGE_BYTES // 2 + 1]),
)
# Gloo's reduce_scatter supports fewer dtypes and reductions than its all_reduce.
kinds = st.sampled_from(["all_reduce", "all_reduce", "reduce_scatter", "reduce_scatter_tensor"])


sizes = st.sampled_from([2, 3, 4, 5])


def cases_of(kinds: Any, what: Any) -> Any:
    case = st.tuples(kinds, st.sampled_from(what), counts, st.sampled_from(LAYOUTS), st.sampled_from(WAYS))
    return st.lists(case, min_size=1, max_size=6)


@pytest.mark.slow
@no_shrinking
@given(size=sizes, cases=cases_of(kinds, REDUCTIONS))
def test_reductions(pools: Pools, size: int, cases: list[Any]) -> None:
    pools.run(size, run_reductions, cases)


# -- collectives that move bytes ---------------------------------------------------------------------------------------


def run_moves(world: World, cases: list[Any]) -> None:
    for seed, (kind, dtype, count, form, way) in enumerate(cases):
        n, rank, root = world.size, world.rank, seed % world.size
        asynchronous = way != "sync"
        results: list[list[Tensor]] = []
        for group, layout in ((None, form), (gloo(), "plain")):  # Gloo silently ignores strides
            # Gloo does not support every dtype, so it gets bytes.
            kept, unit = (dtype, 1) if group is None else (torch.uint8, dtype.itemsize)
            length = count * unit
            mine = shaped(values(seed, rank, count, dtype).view(kept), layout)
            empty = [torch.zeros_like(mine, requires_grad=False) for _ in range(n)]
            whole = torch.zeros(n * length, dtype=kept)
            if kind == "broadcast":
                work, result = dist.broadcast(mine, root, group, asynchronous), [mine]
            elif kind == "all_gather":
                work, result = dist.all_gather(empty, mine, group, asynchronous), empty
            elif kind == "all_gather_into_tensor":
                work = all_gather_into(whole, mine.detach().reshape(-1), group, asynchronous)
                result = [whole]
            elif kind == "all_gather_in_place":
                part = whole[rank * length : (rank + 1) * length].copy_(mine.detach().reshape(-1))
                work, result = all_gather_into(whole, part, group, asynchronous), [whole]
            finish(way if group is None or way == "sync" else "async", work)  # not all Gloo works have futures
            results.append([tensor.detach().reshape(-1).view(dtype) for tensor in result])
        assert_same(*results, f"rank {rank} of {n}: {cases[seed]}")


MOVES = ("broadcast", "all_gather", "all_gather_into_tensor", "all_gather_in_place")


@pytest.mark.slow
@no_shrinking
@given(size=sizes, cases=cases_of(st.sampled_from(MOVES), EVERY))
def test_moving_bytes(pools: Pools, size: int, cases: list[Any]) -> None:
    pools.run(size, run_moves, cases)


# -- the order of summation --------------------------------------------------------------------------------------------


def tree_sum(parts: list[Tensor]) -> Tensor:
    """Return the pairwise sum: of the first parts, up to the largest power of two, and of the rest."""
    if len(parts) == 1:
        return parts[0]
    half = 2 ** ((len(parts) - 1).bit_length() - 1)
    return tree_sum(parts[:half]) + tree_sum(parts[half:])


def check_sums(world: World, dtype: torch.dtype, count: int, cuts: list[int], offset: int, shares: bool) -> None:
    group: Any = dist.group.WORLD
    expected = tree_sum([values(1, rank, count, dtype) for rank in range(world.size)])
    edges = sorted({0, count, *(cut % (count + 1) for cut in cuts)})
    # A rank with shared memory and a rank that stages its data get the same result.
    memory = torch.zeros(count + offset, dtype=dtype)
    if shares and world.rank != 1:
        memory = group.allocate(count + offset, dtype)
    bucket = memory[offset:]
    bucket.copy_(values(1, world.rank, count, dtype))
    for start, stop in pairwise(edges):
        dist.all_reduce(bucket[start:stop])
    assert torch.equal(bucket, expected), f"rank {world.rank}: {(bucket != expected).sum()} elements differ"

    launched = group.allocate(count, dtype)
    launched.copy_(values(1, world.rank, count, dtype))
    pieces = [launched[start:stop] for start, stop in pairwise(edges)]
    for operation in [group.launch_all_reduce(piece) for piece in pieces]:
        operation.wait()
    assert torch.equal(launched, expected)
    group.free(launched)

    piece = torch.empty(count, dtype=dtype)
    dist.reduce_scatter(piece, [values(1, world.rank, count, dtype) for _ in range(world.size)])
    assert torch.equal(piece, expected)
    if shares and world.rank != 1:
        group.free(memory)


@no_shrinking
@given(
    size=st.sampled_from([2, 4, 4]),
    dtype=st.sampled_from(FLOATS),
    count=st.one_of(st.integers(1, 5000), st.integers(STAGE_BYTES // 8, STAGE_BYTES // 2)),
    cuts=st.lists(st.integers(0, 10**6), max_size=5),
    offset=st.integers(0, 40),
    shares=st.booleans(),
)
def test_sums_have_the_same_bits_for_every_layout(
    pools: Pools, size: int, dtype: torch.dtype, count: int, cuts: list[int], offset: int, shares: bool
) -> None:
    pools.run(size, check_sums, dtype, count, cuts, offset, shares)


# -- coalesced ----------------------------------------------------------------------------------


def run_coalesced(world: World) -> None:
    n, rank, group = world.size, world.rank, gloo()
    lists = [[values(i, rank, count, torch.float32) for i, count in enumerate((1, 700, 0, 33))] for _ in range(2)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        dist.all_reduce_coalesced(lists[0])
        dist.all_reduce_coalesced(lists[1], group=group)
    assert_same(*lists, "all_reduce_coalesced", rounds=True)
    everyone = [[torch.zeros(2), torch.zeros(3)] for _ in range(n)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        dist.all_gather_coalesced(everyone, [torch.full((2,), float(rank)), torch.full((3,), float(rank))])
    assert [[tensor[0].item() for tensor in some] for some in everyone] == [[r, r] for r in range(n)]


def test_coalesced_collectives(pools: Pools) -> None:
    pools.run(3, run_coalesced)
