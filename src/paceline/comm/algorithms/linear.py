"""Point to point: the root serves the other ranks one by one, in p−1 steps of n bytes. All-to-all is pairwise.

This is the baseline for the other algorithms, none of which is faster with two ranks ::

    broadcast from rank 1 of 4            reduction to rank 1 of 4
    step 1    1 → 2                       step 1    2 → 1    adds
    step 2    1 → 3                       step 2    3 → 1    adds
    step 3    1 → 0                       step 3    0 → 1    adds
"""

from __future__ import annotations

from paceline.comm.algorithms.schedule import Schedule, Transfer

_WHOLE = range(1)


def broadcast(size: int, root: int = 0) -> Schedule:
    """Build the broadcast: p−1 steps; the root sends (p−1) · n bytes, one message at a time."""
    steps = tuple((Transfer(root, (root + place) % size, _WHOLE, reduce=False),) for place in range(1, size))
    return Schedule("linear_broadcast", "broadcast", size, 1, steps, root)


def reduce(size: int, root: int = 0) -> Schedule:
    """Build the reduction: p−1 steps; the root receives (p−1) · n bytes, added in rank order from the next rank."""
    steps = tuple((Transfer((root + place) % size, root, _WHOLE, reduce=True),) for place in range(1, size))
    return Schedule("linear_reduce", "reduce", size, 1, steps, root)


def all_to_all(size: int) -> Schedule:
    """Build the pairwise exchange: in step k, rank r and rank r xor k swap the parts meant for each other.

    Chunk s·p + d is rank s's part for rank d, so all chunks together are p tensors of n bytes. If p is a power of two:
    p−1 steps, (p−1)/p · n bytes from every rank. There is no public function for it, only this schedule.
    """
    steps = (
        tuple(
            Transfer(rank, rank ^ step, range(chunk := rank * size + (rank ^ step), chunk + 1), reduce=False)
            for rank in range(size)
            if rank ^ step < size
        )
        for step in range(1, 1 << (size - 1).bit_length())
    )
    return Schedule("pairwise_all_to_all", "all-to-all", size, size * size, tuple(steps))
