"""Folding: lines that several ranks print alike are shown once.

Each rank's lines wait in a queue until those of the others have come, or for :data:`PATIENCE_S`. The head that comes
first by its number is shown, together with all heads that are equal to it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

PATIENCE_S = 0.8
"""How long a line waits for the same one of another rank, of those that still run."""
AHEAD = 200
"""How many lines of another rank are searched for a head."""


@dataclass
class _Queue:
    items: deque[tuple[int, float, Hashable]] = field(default_factory=deque)
    """Number, time of arrival and value of what is not shown yet."""
    count: int = 0
    """How many items have come."""
    ended: bool = False
    """Whether the rank prints nothing any more."""


class Folding:
    """The queues of the ranks that run one cell."""

    def __init__(self, ranks: list[int]) -> None:
        self._queues = {rank: _Queue() for rank in ranks}

    def add(self, rank: int, value: Hashable, now: float) -> None:
        """Append what `rank` has printed at the moment `now`."""
        queue = self._queues[rank]
        queue.items.append((queue.count, now, value))
        queue.count += 1

    def end(self, rank: int) -> None:
        """Expect nothing more from `rank`."""
        self._queues[rank].ended = True

    def ready(self, now: float) -> Iterator[tuple[Any, list[int]]]:
        """Take the values to be shown now, each with the ranks that it comes from."""
        while heads := {rank: queue.items[0] for rank, queue in self._queues.items() if queue.items}:
            oldest = min(arrival for _, arrival, _ in heads.values())
            awaited = any(not queue.items and not queue.ended for queue in self._queues.values())
            if awaited and now - oldest < PATIENCE_S:
                return
            value = self._next(heads)
            group = [rank for rank, head in heads.items() if head[2] == value]
            for rank in group:
                self._queues[rank].items.popleft()
            yield value, group

    def _next(self, heads: dict[int, tuple[int, float, Hashable]]) -> Hashable:
        """Return the head that comes first: one that no other rank has still to print, if there is one."""
        ordered = sorted(heads, key=lambda rank: (heads[rank][0], rank))
        for rank in ordered:
            value = heads[rank][2]
            behind = (queue.items for queue in self._queues.values() if queue.items and queue.items[0][2] != value)
            if not any(value == item for items in behind for _, _, item in islice(items, AHEAD)):
                return value
        return heads[ordered[0]][2]
