"""The time that this process has waited for other ranks in backwards, over all wrappers.

Wrappers measure it anyway, so reading it adds no cost to a step.
"""

from __future__ import annotations

import math
from typing import Protocol
from weakref import WeakSet


class Clock(Protocol):
    """Counts the waiting of one wrapper."""

    @property
    def seconds(self) -> float:
        """Total seconds."""


_clocks: WeakSet[Clock] = WeakSet()


def register(clock: Clock) -> None:
    """Count what `clock` counts, as long as it lives."""
    _clocks.add(clock)


def seconds_waited() -> float:
    """Return the seconds that this process has waited."""
    return math.fsum(clock.seconds for clock in _clocks)
