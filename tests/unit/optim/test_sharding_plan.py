"""Assignment of parameter slices to ranks, as a pure function."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from drawn import draws
from paceline.optim.sharding import cut_evenly, deal_out


@draws(40)
@given(st.lists(st.integers(0, 400), min_size=1, max_size=8), st.integers(1, 5), st.sampled_from([1, 2, 16]))
def test_every_element_has_one_owner_and_shards_differ_by_two_alignments(
    sizes: list[int], ranks: int, align: int
) -> None:
    pieces = cut_evenly(sizes, range(len(sizes)), ranks, align)
    for index, size in enumerate(sizes):
        ends = [0, *(each.stop for each in pieces if each.parameter == index)]
        assert ends[:-1] == [each.start for each in pieces if each.parameter == index]
        assert ends[-1] == size
    assert [each.owner for each in pieces] == sorted(each.owner for each in pieces)
    assert all(each.start % align == 0 for each in pieces)
    shares = [sum(each.numel for each in pieces if each.owner == owner) for owner in range(ranks)]
    assert max(shares) - min(shares) <= 2 * align


def test_whole_parameters_go_to_the_least_loaded_rank() -> None:
    loads = [0, 0]
    pieces = deal_out([5, 9, 3, 4], [0, 1, 2, 3], 2, loads)
    assert [(each.parameter, each.owner) for each in pieces] == [(0, 1), (1, 0), (2, 0), (3, 1)]
    assert loads == [12, 9]
