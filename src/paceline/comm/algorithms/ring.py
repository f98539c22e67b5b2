"""The ring: in every step each rank sends only to the next one, so all links are always busy.

Patarasuk & Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", JPDC 69 (2009). In any
all-reduce each rank sends at least 2 (p−1)/p · n bytes, and in the ring it sends no more. The price is 2 (p−1) steps.

Reduce-scatter with 3 ranks, chunks A B C. The columns show the chunks of each rank (a: its own, A₁₂: a partial sum) ::

              rank 0        rank 1        rank 2
    start     a  b  c       a  b  c       a  b  c
    step 1    rank 0 sends C to 1,  1 sends A to 2,  2 sends B to 0;  each adds
              a  B₂₀ c      a  b  C₀₁     A₁₂ b  c
    step 2    rank 0 sends B to 1,  1 sends C to 2,  2 sends A to 0;  each adds
              A  .  .       .  B  .       .  .  C         rank r has the whole sum of chunk r

All-gather: the sums go around the ring in the same direction and are copied ::

    step 3    A  .  C       A  B  .       .  B  C
    step 4    A  B  C       A  B  C       A  B  C

Every chunk is summed along one path and then copied, so the results on all ranks are bit-identical.
"""

from __future__ import annotations

from collections.abc import Sequence

from paceline.comm.algorithms.schedule import Schedule, Step, Transfer


def reduce_scatter_steps(members: Sequence[int], blocks: Sequence[range]) -> list[Step]:
    """Build the steps among `members`; the i-th member ends with the sum of ``blocks[i]``."""
    size = len(members)
    return [
        tuple(
            Transfer(members[place], members[(place + 1) % size], blocks[(place - 1 - step) % size], reduce=True)
            for place in range(size)
        )
        for step in range(size - 1)
    ]


def all_gather_steps(members: Sequence[int], blocks: Sequence[range]) -> list[Step]:
    """Build the steps among `members`; the i-th member begins with ``blocks[i]``."""
    size = len(members)
    return [
        tuple(
            Transfer(members[place], members[(place + 1) % size], blocks[(place - step) % size], reduce=False)
            for place in range(size)
        )
        for step in range(size - 1)
    ]


def reduce_scatter(size: int) -> Schedule:
    """Build the reduce-scatter: rank r ends with the sum of chunk r. p−1 steps, (p−1)/p · n bytes from every rank."""
    steps = reduce_scatter_steps(range(size), _one_each(size))
    return Schedule("ring_reduce_scatter", "reduce-scatter", size, size, tuple(steps))


def all_gather(size: int) -> Schedule:
    """Build the all-gather: rank r's chunk r goes to all ranks. p−1 steps, (p−1)/p · n bytes sent by every rank."""
    steps = all_gather_steps(range(size), _one_each(size))
    return Schedule("ring_all_gather", "all-gather", size, size, tuple(steps))


def all_reduce(size: int) -> Schedule:
    """Build the all-reduce: reduce-scatter, then all-gather. 2 (p−1) steps, 2 (p−1)/p · n bytes sent by every rank."""
    blocks = _one_each(size)
    steps = reduce_scatter_steps(range(size), blocks) + all_gather_steps(range(size), blocks)
    return Schedule("ring_all_reduce", "all-reduce", size, size, tuple(steps))


def _one_each(size: int) -> list[range]:
    return [range(chunk, chunk + 1) for chunk in range(size)]
