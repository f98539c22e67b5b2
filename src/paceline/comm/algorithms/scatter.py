"""Broadcast of long messages: scatter the pieces down a tree, then pass them around a ring.

Van de Geijn's algorithm: Barnett, Shuler, Gupta, Payne, van de Geijn & Watts, "Building a high-performance collective
communication library", Supercomputing '94. The tree sends the whole message ⌈log₂ p⌉ times through one rank;
this sends about 2 n bytes through every rank, at the price of p−1 more steps.

Four ranks, root 0, chunks A B C D ::

    scatter       step 1    0 → 2  C D
                  step 2    0 → 1  B        2 → 3  D           rank r has chunk r (the root: all)
    all-gather    step 3    0 → 1  A    1 → 2  B    2 → 3  C    3 → 0  D
                  step 4    0 → 1  D    1 → 2  A    2 → 3  B    3 → 0  C
                  step 5    0 → 1  C    1 → 2  D    2 → 3  A    3 → 0  B

With another root, chunks are numbered starting from the root: the rank v places after it gets chunk v.
"""

from __future__ import annotations

from paceline.comm.algorithms.ring import all_gather_steps
from paceline.comm.algorithms.schedule import Schedule, Step, Transfer


def broadcast(size: int, root: int = 0) -> Schedule:
    """Build the broadcast: ⌈log₂ p⌉ + p−1 steps; every rank receives at most 2 (p−1)/p · n bytes, less than 2 n."""
    members = [(root + place) % size for place in range(size)]
    steps = scatter_steps(size, root) + all_gather_steps(members, [range(chunk, chunk + 1) for chunk in range(size)])
    return Schedule("scatter_all_gather_broadcast", "broadcast", size, size, tuple(steps), root)


def scatter_steps(size: int, root: int) -> list[Step]:
    """Build the steps down the binomial tree: a rank forwards the chunks of the receiver's whole subtree."""
    distance = 1
    while distance < size:
        distance *= 2
    steps: list[Step] = []
    while (distance := distance // 2) > 0:
        steps.append(
            tuple(
                Transfer(
                    (root + place - distance) % size,
                    (root + place) % size,
                    range(place, min(place + distance, size)),
                    reduce=False,
                )
                for place in range(distance, size, 2 * distance)
            )
        )
    return steps
