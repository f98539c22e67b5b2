"""Halving and doubling: reduce-scatter by recursive halving, then all-gather by recursive doubling.

Rabenseifner, "Optimization of collective reduction operations", ICCS 2004; Thakur, Rabenseifner & Gropp, IJHPCA 19
(2005). It sends as few bytes as the ring, 2 (p−1)/p · n, in only 2 log₂ p steps, if p is a power of two.

Four ranks, chunks A B C D. Partners exchange halves of the chunks that they still reduce, and add ::

    halving     step 1    0 ↔ 2, 1 ↔ 3    0 and 1 keep A B,  2 and 3 keep C D
                step 2    0 ↔ 1, 2 ↔ 3    0 keeps A,  1 keeps B,  2 keeps C,  3 keeps D:  each a whole sum
    doubling    step 3    0 ↔ 1, 2 ↔ 3    0 and 1 have A B,  2 and 3 have C D
                step 4    0 ↔ 2, 1 ↔ 3    all have A B C D

For other p, the ranks beyond the largest power of two q are folded in: rank q+i first sends everything to rank i, which
adds it, and at the end receives the result from it. Each chunk's sum is completed on one rank and copied from there, so
the results on all ranks are bit-identical.
"""

from __future__ import annotations

from paceline.comm.algorithms.schedule import Schedule, Step, Transfer, backwards


def all_reduce(size: int) -> Schedule:
    """Build the all-reduce: 2 log₂ p steps, 2 (p−1)/p · n bytes sent by every rank.

    If p is not a power of two: two steps and 2 n bytes more.
    """
    core = 1 << (size.bit_length() - 1)
    extra: Step = tuple(Transfer(core + rank, rank, range(core), reduce=True) for rank in range(size - core))
    steps = ([extra] if extra else []) + halving_steps(core)
    return Schedule("halving_doubling_all_reduce", "all-reduce", size, core, tuple(steps + backwards(steps)))


def halving_steps(size: int) -> list[Step]:
    """Build the halving among `size` ranks, a power of two: rank r ends with the sum of chunk r."""
    steps: list[Step] = []
    distance = size // 2
    while distance > 0:
        # A rank still holds the sums of 2·distance chunks. Its partner's half begins at the partner's number, rounded
        # down to a multiple of distance.
        steps.append(
            tuple(
                Transfer(rank, rank ^ distance, _half_of(rank ^ distance, distance), reduce=True)
                for rank in range(size)
            )
        )
        distance //= 2
    return steps


def _half_of(rank: int, distance: int) -> range:
    first = rank // distance * distance
    return range(first, first + distance)
