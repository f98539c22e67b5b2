"""The binomial tree: in every step the number of ranks that have finished doubles, so ⌈log₂ p⌉ steps suffice.

No algorithm has fewer steps, because a rank can reach only one other rank per step. The tree pays off for short
messages, because every step sends the whole message; see Thakur, Rabenseifner & Gropp, "Optimization of collective
communication operations in MPICH", IJHPCA 19 (2005).

Reduction to rank 0 of 6 ranks; ``→`` adds ::

    step 1    1 → 0    3 → 2    5 → 4
    step 2    2 → 0
    step 3    4 → 0

A broadcast runs the steps in reverse and copies instead of adding: ``0 → 4``, then ``0 → 2``, then ``0 → 1, 2 → 3, 4 →
5``. Another root takes the place of rank 0, followed by the ranks after it in order. The whole tensor is one chunk.
"""

from __future__ import annotations

from paceline.comm.algorithms.schedule import Schedule, Step, Transfer, backwards

_WHOLE = range(1)


def reduce_steps(size: int, root: int = 0) -> list[Step]:
    """Build the steps toward `root`; the rank v places after it sends in the step of v's lowest set bit."""
    steps = []
    distance = 1
    while distance < size:
        senders = range(distance, size, 2 * distance)
        steps.append(
            tuple(
                Transfer((root + place) % size, (root + place - distance) % size, _WHOLE, reduce=True)
                for place in senders
            )
        )
        distance *= 2
    return steps


def reduce(size: int, root: int = 0) -> Schedule:
    """Build the reduction: ⌈log₂ p⌉ steps; every rank but the root sends n bytes, the root receives ⌈log₂ p⌉ · n."""
    return Schedule("tree_reduce", "reduce", size, 1, tuple(reduce_steps(size, root)), root)


def broadcast(size: int, root: int = 0) -> Schedule:
    """Build the broadcast: ⌈log₂ p⌉ steps; every rank but the root receives n bytes, the root sends ⌈log₂ p⌉ · n."""
    return Schedule("tree_broadcast", "broadcast", size, 1, tuple(backwards(reduce_steps(size, root))), root)


def all_reduce(size: int) -> Schedule:
    """Build the all-reduce: reduction to rank 0, then broadcast from it. 2 ⌈log₂ p⌉ steps of n bytes."""
    steps = reduce_steps(size)
    return Schedule("tree_all_reduce", "all-reduce", size, 1, tuple(steps + backwards(steps)))
