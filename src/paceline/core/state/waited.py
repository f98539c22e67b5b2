"""The time that this process has waited for other ranks in backwards, over all of its wrappers.

Clocks count in any case, so whoever asks here costs a step nothing.
"""

from __future__ import annotations

import math
from typing import Protocol
from weakref import WeakSet


class Clock(Protocol):
    """Counts the waiting of one wrapper."""

    @property
    def seconds(self) -> float:
        """Seconds so far."""


_clocks: WeakSet[Clock] = WeakSet()


def register(clock: Clock) -> None:
    """Count what `clock` counts, as long as it lives."""
    _clocks.add(clock)


def seconds_waited() -> float:
    """Return the seconds that this process has waited so far."""
    return math.fsum(clock.seconds for clock in _clocks)
