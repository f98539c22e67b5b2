"""``paceline explain bubble``: bubbles of late ranks, compared with values computed by hand."""

from __future__ import annotations

import pytest

from paceline.tools.explain import bubble
from paceline.tools.explain.explain_command import MOST_RANKS

RANKS = [2, MOST_RANKS]


@pytest.mark.parametrize("ranks", RANKS)
def test_bubbles_are_independent_of_bandwidth_and_vanish_for_equal_work(ranks: int) -> None:
    late, fast, equal = bubble.late_rank(ranks)
    # By hand: half of the 75 + 150 ms of extra work.
    assert late.bubbles == pytest.approx([0.0 if rank == bubble.LATE else 0.1125 for rank in range(ranks)])
    assert fast.bubbles == late.bubbles
    assert fast.communication < 0.6 * late.communication
    assert equal.bubbles == [0.0] * ranks
    assert equal.length < late.length


@pytest.mark.parametrize("ranks", RANKS)
def test_ranks_that_synchronize_once_wait_for_the_largest_sum(ranks: int) -> None:
    each, once = bubble.accumulation(ranks)
    late = [sum(micro % ranks == rank for micro in range(bubble.MICRO_BATCHES)) for rank in range(ranks)]
    assert each.bubbles == pytest.approx([0.1125 * (bubble.MICRO_BATCHES - times) for times in late])
    assert once.bubbles == pytest.approx([0.1125 * (max(late) - times) for times in late], abs=1e-8)
    assert once.communication == pytest.approx(each.communication / bubble.MICRO_BATCHES, rel=0.3)
