"""The places of a job's ranks on this host, including places that are left out after failures.

A place is a slot for a rank. It keeps its number for the whole job and, on a host with GPUs, stands for the GPU with
that number. If the rank in a place has caused two early failures, the place is left out for a while and the job runs
with fewer ranks. Decision 0057 explains why.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

REJOIN_S = 600.0
"""Seconds until a left-out place is tried again."""
WELL_S = 600.0
"""A start that lasts longer than this, in seconds, resets the counts of failures."""


@dataclass(frozen=True)
class Change:
    """A change in the number of ranks, or only in their places, from one start to the next."""

    before: int
    after: int
    why: str


class Places:
    """Tracks the places that the ranks of one job use.

    Args:
        count: number of ranks that the user asked for.
        minimum: minimum number of ranks; None for `count`.
    """

    used: tuple[int, ...]
    """The place of each local rank."""

    def __init__(self, count: int, minimum: int | None = None) -> None:
        self._count, self._least = count, count if minimum is None else minimum
        self.used = tuple(range(count))
        self._failures = Counter[int]()
        """Number of early failures that each place caused."""
        self._until: dict[int, float] = {}
        """When to try each left-out place again."""

    @property
    def lacks_some(self) -> bool:
        """Whether the current start has fewer ranks than the user asked for."""
        return len(self.used) < self._count

    def failed(self, rank: int | None, seconds: float, now: float) -> bool:
        """Count a failed start that lasted `seconds`; return whether a place is left out because of it.

        Args:
            rank: the rank whose place may be the cause; None if no place is to blame.
        """
        if seconds > WELL_S:
            self._failures.clear()
        if rank is None or self._least == self._count:
            return False
        place = self.used[rank]
        self._failures[place] += 1
        if self._failures[place] > 1:
            self._until[place] = now + REJOIN_S
        return self._failures[place] > 1

    def next(self, virtual_ranks: int | None, now: float) -> tuple[int, ...]:
        """Return the places for the next start: all places that are not left out, or every place if too few remain.

        Args:
            virtual_ranks: number of virtual ranks, which must be divisible by the number of ranks; 0 for none; None if
                unknown. If unknown, the number of ranks must be a power of two.
        """
        available = [place for place in range(self._count) if self._until.get(place, now) <= now]
        sizes = [size for size in range(self._least, len(available) + 1) if self._divides(size, virtual_ranks)]
        return tuple(available[: sizes[-1]]) if sizes else tuple(range(self._count))

    def _divides(self, size: int, virtual_ranks: int | None) -> bool:
        # The requested number of ranks is always valid. The number of virtual ranks is a power of two, and so is every
        # divisor of it.
        if size == self._count or (virtual_ranks is None and not _is_power_of_two(self._count)):
            return True
        return _is_power_of_two(size) if virtual_ranks is None else virtual_ranks % size == 0

    def move(self, virtual_ranks: int | None, now: float) -> Change | None:
        """Switch to the places of the next start; return the change, or None if they stay the same."""
        previous, self.used = self.used, self.next(virtual_ranks, now)
        if previous == self.used:
            return None
        if len(previous) < len(self.used):
            back = _named([place for place in self.used if place not in previous])
            return Change(len(previous), len(self.used), f"{back} tried again")
        left_out = _named([place for place, until in sorted(self._until.items()) if until > now])
        return Change(len(previous), len(self.used), f"{left_out} left out after two failures, for {REJOIN_S:g} s")

    @property
    def are_the_first(self) -> bool:
        """Whether every rank's place has the same number as the rank."""
        return self.used == tuple(range(len(self.used)))

    def select(self, shares: Sequence[str]) -> list[str]:
        """Return the entries of `shares` for the used places; all of `shares` if it has too few."""
        return [shares[place] for place in self.used] if len(shares) >= self._count else list(shares)


def _is_power_of_two(number: int) -> bool:
    return number & (number - 1) == 0


def _named(places: Sequence[int]) -> str:
    return f"place {places[0]} is" if len(places) == 1 else f"places {', '.join(map(str, places))} are"
