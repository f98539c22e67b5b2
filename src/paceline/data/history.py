"""The batches that were consumed from a source in this process, as stretches of neighbouring global batches."""

from __future__ import annotations

from typing import NamedTuple


class Stretch(NamedTuple):
    """Global batches of an epoch from `begin` to `end`, which is not among them."""

    epoch: int
    begin: int
    end: int
    length: int | None
    """Number of global batches in the epoch; None where it is not known yet."""
    order: int | None
    """Digest of the epoch's order; None for a stream."""


class History:
    """Collects stretches. One ends where the position jumps, or its epoch ends."""

    def __init__(self) -> None:
        self.begin = 0  # where the stretch under way began
        self._closed: list[Stretch] = []  # in the order in which they were consumed

    def add(self, stretch: Stretch) -> None:
        """Add the stretch under way, unless it is empty; the next one begins where it ends."""
        self.begin = stretch.end
        if stretch.end > stretch.begin:
            self._closed.append(stretch)

    def take_back(self) -> None:
        """Forget the latest stretch: it was taken as consumed, and is not."""
        self._closed[-1:] = []

    def up_to(self, stretch: Stretch) -> list[Stretch]:
        """Return what was added, and the stretch under way unless it is empty."""
        return [*self._closed, *([stretch] if stretch.end > stretch.begin else [])]
