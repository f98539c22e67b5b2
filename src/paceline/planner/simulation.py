"""A discrete-event simulation of a training step: gradients arrive, fill buckets, and are reduced in order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate, pairwise

from paceline.ddp.options.buckets import Overlap, assign, overlap
from paceline.planner.workload import Workload


@dataclass(frozen=True)
class StepTime:
    """The parts of a step, in seconds."""

    compute_s: float
    exposed_s: float
    """Communication that the step waits for after backward."""
    hidden_s: float = 0.0
    """Communication that overlaps with backward."""
    interference_s: float = 0.0
    """Slowdown of backward by communication that overlaps with it."""
    jitter_s: float = 0.0
    """Waiting for the slowest rank."""

    @property
    def length_s(self) -> float:
        """Seconds of the whole step."""
        return self.compute_s + self.exposed_s + self.interference_s + self.jitter_s


def backward_timeline(workload: Workload, reduce_seconds: Callable[[float], float]) -> Overlap:
    """Return when each bucket fills up and is reduced, given the seconds to reduce a number of bytes."""
    sizes = [layer.nbytes for layer in workload.layers]
    arrived = list(accumulate(layer.backward_s for layer in workload.layers))
    buckets = assign(sizes, [0] * len(sizes), range(len(sizes)), workload.bucket_bytes)
    full = [0.0, *(arrived[indices[-1]] for indices in buckets)]
    fill = [end - begin for begin, end in pairwise(full)]
    return overlap(fill, [reduce_seconds(sum(sizes[index] for index in indices)) for indices in buckets])


def simulate(workload: Workload, reduce_seconds: Callable[[float], float], interference: float = 0.0) -> StepTime:
    """Return the time of a step whose last backward reduces gradients, without jitter.

    Args:
        workload: the step of one device.
        reduce_seconds: the seconds to reduce a number of bytes.
        interference: slowdown of backward per second of communication that overlaps with it.
    """
    timeline = backward_timeline(workload, reduce_seconds)
    reducing = sum(end - begin for begin, end in zip(timeline.begin, timeline.end, strict=True))
    hidden = max(0.0, reducing - timeline.exposed)
    return StepTime(workload.compute_s, timeline.exposed, hidden, interference * hidden)
