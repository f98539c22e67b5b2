"""A step of ranks that are not equally fast: when each has computed, when all meet, and the causes of waiting.

Waiting has two causes. Until the last rank has come it is a bubble, which that rank caused, and no network makes it
shorter. From then on it is communication, which a network without cost would save. The profiler splits it in the same
way.
The numbers of the example are those of :mod:`paceline.tools.explain.pictures.timeline`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from paceline.comm.algorithms import build
from paceline.comm.algorithms.cost import Model
from paceline.core.state.buckets import Overlap, overlap
from paceline.tools.explain.pictures.timeline import BACKWARD, LINK, SIZES

FORWARD = BACKWARD / 2
"""Seconds: backward computes two gradients where forward computes one output."""
OPTIMIZER = 0.010
"""Seconds."""


@dataclass(frozen=True)
class RankSteps:
    """A forward and a backward on every rank, up to the moment at which all have the averages."""

    start: tuple[float, ...]
    """Begin of forward, in seconds, by rank."""
    forward: tuple[float, ...]
    """End of forward, by rank."""
    came: tuple[float, ...]
    """End of backward, by rank; from then on the rank waits."""
    network: Overlap
    """The all-reduces. A bucket is full when every rank has filled it."""

    @property
    def last(self) -> float:
        """Return when the last rank has ended its backward."""
        return max(self.came)

    @property
    def end(self) -> float:
        """Return when all have the averages."""
        return max(self.last, self.network.end[-1])

    @property
    def bubbles(self) -> tuple[float, ...]:
        """Return the seconds that each rank waits for the last one."""
        return tuple(self.last - came for came in self.came)

    @property
    def communication(self) -> float:
        """Return the seconds that each rank waits for the network alone."""
        return self.end - self.last


def run(start: Sequence[float], work: Sequence[float], link: Model = LINK) -> RankSteps:
    """Run forward and backward, and all-reduce the buckets with a ring as soon as every rank has filled them.

    Args:
        start: seconds at which each rank begins.
        work: the work of each rank's batch; 1 takes the seconds of the example.
        link: the cost of messages.
    """
    forward = [begin + FORWARD * amount for begin, amount in zip(start, work, strict=True)]
    shares = [BACKWARD * size / sum(SIZES) for size in SIZES]
    full = [
        list(accumulate((amount * share for share in shares), initial=begin))[1:]
        for begin, amount in zip(forward, work, strict=True)
    ]
    everywhere = [max(times) for times in zip(*full, strict=True)]
    ring = build("ring_all_reduce", len(work))
    steps = [later - earlier for earlier, later in zip([0.0, *everywhere], everywhere, strict=False)]
    network = overlap(steps, [link.seconds(ring, size) for size in SIZES])
    return RankSteps(tuple(start), tuple(forward), tuple(times[-1] for times in full), network)
