"""The alpha-beta-gamma model of an algorithm's cost.

A message costs alpha seconds, plus beta for each byte; reducing a byte costs gamma. Hockney, "The communication
challenge for MPP: Intel Paragon and Meiko CS-2", Parallel Computing 20 (1994); with gamma as in Thakur, Rabenseifner &
Gropp, IJHPCA 19 (2005). A rank sends and receives at the same time, one message each way. So a step takes

    alpha  +  beta · the most bytes that a rank sends or receives  +  gamma · the most bytes that a rank reduces

and an algorithm takes the sum of its steps. For p ranks, n bytes, L = ⌈log₂ p⌉ (tested equal to the schedules):

    linear broadcast, reduce           (p−1) α  +  (p−1) n β          [+ (p−1) n γ]
    tree broadcast, reduce             L α      +  L n β              [+ L n γ]
    scatter, all-gather (p = 2^L)      (L+p−1) α + 2 (p−1)/p n β
    ring reduce-scatter, all-gather    (p−1) α  +  (p−1)/p n β        [+ (p−1)/p n γ]
    ring all-reduce                    2(p−1) α +  2 (p−1)/p n β       + (p−1)/p n γ
    tree all-reduce                    2 L α    +  2 L n β             + L n γ
    halving-doubling (p = 2^L)         2 L α    +  2 (p−1)/p n β       + (p−1)/p n γ
    hierarchical, h hosts of m         2(m+h−2) α + 2 (p−1)/p n β      + (p−1)/p n γ
"""

from __future__ import annotations

from typing import NamedTuple

from paceline.comm.algorithms.schedule import Schedule, Step


class Model(NamedTuple):
    """Costs of messages and sums."""

    alpha: float
    """Seconds for a message."""
    beta: float
    """Seconds for a byte that is sent."""
    gamma: float = 0.0
    """Seconds for a byte that is reduced."""

    def seconds(self, schedule: Schedule, nbytes: float) -> float:
        """Return the seconds that `schedule` takes for a tensor of `nbytes`."""
        messages, moved, reduced = features(schedule, nbytes)
        return self.alpha * messages + self.beta * moved + self.gamma * reduced


Features = tuple[float, float, float]
"""Factors of alpha, beta and gamma."""


def features(schedule: Schedule, nbytes: float) -> Features:
    """Count the consecutive messages, the bytes moved and the bytes reduced, for a tensor of `nbytes`."""
    counts = [_count(step, nbytes / schedule.chunks) for step in schedule.steps]
    messages, moved, reduced = (sum(column) for column in zip(*counts, strict=True)) if counts else (0.0, 0.0, 0.0)
    return messages, moved, reduced


def _count(step: Step, per_chunk: float) -> Features:
    """Count the factors of one step: the busiest rank's work."""
    if not step:
        return 0.0, 0.0, 0.0
    sent: dict[int, float] = {}
    received: dict[int, float] = {}
    reduced: dict[int, float] = {}
    for transfer in step:
        size = per_chunk * len(transfer.chunks)
        sent[transfer.src] = sent.get(transfer.src, 0.0) + size
        received[transfer.dst] = received.get(transfer.dst, 0.0) + size
        if transfer.reduce:
            reduced[transfer.dst] = reduced.get(transfer.dst, 0.0) + size
    return 1.0, max(*sent.values(), *received.values()), max(reduced.values(), default=0.0)
