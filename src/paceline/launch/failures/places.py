"""The places of a job's ranks on this host, and which of them are left out after failures.

A place is what a rank has of its host: its number in the whole job, a GPU where there are some, its pinned cores.
A place whose rank was the cause of two failed starts, neither of which ran well, is left out for a while, and the job
goes on with fewer ranks.

All of this is a function of plain values and the time. Decision 0057 says why.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

REJOIN_S = 600.0
"""Seconds for which a place is left out."""
WELL_S = 600.0
"""A start that lasts longer has run well: its failure is no repetition of the one before."""


@dataclass(frozen=True)
class Change:
    """A change of the ranks from one start to the next: of their number, or of their places alone."""

    before: int
    after: int
    why: str


class Places:
    """The places of one job, and those that the present start uses.

    Args:
        count: the number of ranks that the user asked for.
        least: the fewest ranks that the job may go on with; None for `count`.
    """

    used: tuple[int, ...]
    """The place of each local rank."""

    def __init__(self, count: int, least: int | None = None) -> None:
        self._count, self._least = count, count if least is None else least
        self.used = tuple(range(count))
        self._failures = Counter[int]()
        """Failed starts that each place was the cause of, since the last one that ran well."""
        self._until: dict[int, float] = {}
        """The time until which places are left out."""

    @property
    def lacks_some(self) -> bool:
        """Whether the present start has fewer ranks than the user asked for."""
        return len(self.used) < self._count

    def failed(self, rank: int | None, seconds: float, now: float) -> bool:
        """Count a failed start that lasted so long; return whether a place is left out because of it.

        Args:
            rank: the rank whose place may be the cause; None if there is none.
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
        """Return the places of the next start: those that are not left out, or all where these are too few.

        Args:
            virtual_ranks: their number, which the ranks must divide; 0 if there are none; None if that is not known
                yet, so that only a power of two is sure to divide it.
        """
        there = [place for place in range(self._count) if self._until.get(place, now) <= now]
        sizes = [size for size in range(self._least, len(there) + 1) if self._divides(size, virtual_ranks)]
        return tuple(there[: sizes[-1]]) if sizes else tuple(range(self._count))

    def _divides(self, size: int, virtual_ranks: int | None) -> bool:
        # The user's number fits in any case. If it is no power of two, there are no virtual ranks, whose number is one.
        if size == self._count or (virtual_ranks is None and not _is_power_of_two(self._count)):
            return True
        return _is_power_of_two(size) if virtual_ranks is None else virtual_ranks % size == 0

    def move(self, virtual_ranks: int | None, now: float) -> Change | None:
        """Take the places of the next start; return how they change, None if they do not."""
        before, self.used = self.used, self.next(virtual_ranks, now)
        if before == self.used:
            return None
        if len(before) < len(self.used):
            back = _named([place for place in self.used if place not in before])
            return Change(len(before), len(self.used), f"{back} tried again")
        left_out = _named([place for place, until in sorted(self._until.items()) if until > now])
        return Change(len(before), len(self.used), f"{left_out} left out after two failures, for {REJOIN_S:g} s")

    @property
    def are_the_first(self) -> bool:
        """Whether each rank has the place of its own number."""
        return self.used == tuple(range(len(self.used)))

    def select(self, shares: Sequence[str]) -> list[str]:
        """Return the shares of the used places, out of one or more for each place; `shares` where there are fewer."""
        return [shares[place] for place in self.used] if len(shares) >= self._count else list(shares)


def _is_power_of_two(number: int) -> bool:
    return number & (number - 1) == 0


def _named(places: Sequence[int]) -> str:
    return f"place {places[0]} is" if len(places) == 1 else f"places {', '.join(map(str, places))} are"
