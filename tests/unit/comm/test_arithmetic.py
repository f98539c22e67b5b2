"""Binary-tree sums give the same bits no matter who adds up the subtrees."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed import ReduceOp

from paceline.comm import arithmetic
from paceline.comm.arithmetic import reduce_into


def summed(parts: list[Tensor]) -> Tensor:
    result = torch.empty_like(parts[0])
    reduce_into([result], parts, ReduceOp.SUM)
    return result


def parts_of(count: int, seed: int, length: int = 33) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    scales = torch.randn(count, length, generator=generator).mul(4).exp()  # every order rounds differently
    return list(torch.randn(count, length, generator=generator) * scales)


@given(st.integers(0, 4), st.integers(0, 4), st.integers(0, 2**20))
def test_sums_of_subtrees_give_the_bits_of_the_whole(depth: int, cut: int, seed: int) -> None:
    parts = parts_of(2**depth, seed)
    size = 2 ** min(cut, depth)
    subtrees = [summed(parts[begin : begin + size]) for begin in range(0, len(parts), size)]
    assert torch.equal(summed(subtrees), summed(parts))


@given(st.integers(1, 17), st.integers(0, 16), st.integers(0, 2**20))
def test_the_result_can_be_stored_in_any_part(count: int, place: int, seed: int) -> None:
    expected = summed(parts_of(count, seed))
    parts = parts_of(count, seed)
    reduce_into([parts[place % count]], parts, ReduceOp.SUM)
    assert torch.equal(parts[place % count], expected)


def test_splitting_into_pieces_keeps_the_bits() -> None:
    length = arithmetic.PIECE_BYTES // 4 + 5
    parts = parts_of(6, 0, length)
    heads, tails = [part[:9] for part in parts], [part[-9:] for part in parts]
    whole = summed(parts)
    assert torch.equal(whole[:9], summed(heads))
    assert torch.equal(whole[-9:], summed(tails))
