"""Output of ranks in the notebook: each line with its rank; equal lines of several ranks are shown once.

Each rank's lines are queued until the other ranks have printed theirs, or for :data:`PATIENCE_S`. Of the first lines in
the queues, the one with the lowest number is shown, together with all that are equal to it.
"""

from __future__ import annotations

import re
import sys
import time
from collections import deque
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from IPython.display import clear_output, display

from paceline.core.missing_ranks import named_ranks

PATIENCE_S = 0.8
"""Seconds that a line waits for equal lines from other running ranks."""
AHEAD = 200
"""Maximum number of lines to search in another queue for an equal line."""


@dataclass
class _Queue:
    items: deque[tuple[int, float, Hashable]] = field(default_factory=deque)
    """Number, arrival time and value of each line that has not been shown."""
    count: int = 0
    """Number of lines received."""
    ended: bool = False
    """Whether the rank has finished."""


class Folding:
    """The queues of lines from the ranks that run one cell."""

    def __init__(self, ranks: list[int]) -> None:
        self._queues = {rank: _Queue() for rank in ranks}

    def add(self, rank: int, value: Hashable, now: float) -> None:
        """Append a line of `rank` that arrived at `now`."""
        queue = self._queues[rank]
        queue.items.append((queue.count, now, value))
        queue.count += 1

    def end(self, rank: int) -> None:
        """Mark `rank` as finished."""
        self._queues[rank].ended = True

    def ready(self, now: float) -> Iterator[tuple[Any, list[int]]]:
        """Yield the values to show now, each with its ranks."""
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
        """Return the head with the lowest number among those that no other rank prints later, or else among all."""
        # By number alone, a line printed by a single rank would keep all later equal lines from being joined.
        ordered = sorted(heads, key=lambda rank: (heads[rank][0], rank))
        for rank in ordered:
            value = heads[rank][2]
            behind = (queue.items for queue in self._queues.values() if queue.items and queue.items[0][2] != value)
            if not any(value == item for items in behind for _, _, item in islice(items, AHEAD)):
                return value
        return heads[ordered[0]][2]


LIVE_S = 0.5
"""Seconds between updates of an incomplete line, such as a progress bar."""

_CURSOR = re.compile(rb"\x1b\[(?:\?25[hl]|\d*[A-GJK])")
"""Escape sequences of progress bars that move or hide the cursor or clear the line."""


class Screen:
    """The output of one cell on `ranks` of a world of `size`. Only the first rank's figures are shown."""

    def __init__(self, ranks: Sequence[int], size: int) -> None:
        self._ranks, self._size = list(ranks), size
        self._folding = Folding(self._ranks)
        self._partial = dict.fromkeys(ranks, b"")
        """Incomplete last line of each rank."""
        self._live = 0
        """Length of the incomplete line on the screen, which the next line overwrites."""
        self._live_text, self._looked = b"", time.monotonic()
        """Incomplete line of the first rank when it was last updated, and the time of this update."""
        self._shown = 0
        """Number of figures and other displays of the first rank."""
        self._others: list[tuple[int, tuple[Any, ...]]] = []
        """Rank and content of the displays of other ranks."""

    def take(self, rank: int, printed: bytes) -> None:
        """Take the output of `rank`."""
        *lines, rest = (self._partial[rank] + printed).split(b"\n")
        now = time.monotonic()
        for line in lines:
            text = _final(line)
            if text or not line:  # drops lines that only moved the cursor
                self._folding.add(rank, text, now)
        self._partial[rank] = rest

    def end(self, rank: int) -> None:
        """Mark `rank` as finished."""
        if self._partial[rank]:
            self.take(rank, b"\n")
        self._folding.end(rank)

    def show(self) -> None:
        """Print the lines that are ready, and update the first rank's progress bar."""
        now = time.monotonic()
        lines = [f"{self.name(group)} | {text}" for text, group in self._folding.ready(now)]
        if lines:
            lines[0] = lines[0].ljust(self._live)  # overwrites the progress bar
            self._write("\n".join(lines), "\n")
            self._live = 0
        if now - self._looked >= LIVE_S:
            text, self._looked = self._partial[self._ranks[0]], now
            if text and text != self._live_text:
                line = f"{self.name(self._ranks[:1])} | {_final(text)}"
                self._write(line.ljust(self._live), "")
                self._live = len(line)
            self._live_text = text

    def _write(self, text: str, end: str) -> None:
        sys.stdout.write(("\r" if self._live else "") + text + end)
        sys.stdout.flush()

    def name(self, group: Sequence[int]) -> str:
        """Return "rank 0", "ranks 0, 2" or "all ranks"."""
        return "all ranks" if len(group) == self._size > 1 else named_ranks(sorted(group))

    def display(self, rank: int, content: tuple[Any, ...]) -> None:
        """Show a figure of the first rank, or keep a figure of another rank."""
        if rank != self._ranks[0]:
            self._others.append((rank, content))
            return
        self.show()
        self._shown += 1
        _display(content)

    def clear(self, rank: int, wait: bool) -> None:
        """Clear the output if the first rank requests it."""
        if rank == self._ranks[0]:
            clear_output(wait)  # type: ignore[no-untyped-call]

    def finish(self) -> None:
        """Show the remaining output after all ranks have finished."""
        for rank in self._ranks:
            self.end(rank)
        self.show()
        if self._live:
            self._write("", "\n")
            self._live = 0
        if not self._shown:  # such as in "if rank == 1: show()"
            for rank, content in self._others:
                self._write(f"{self.name([rank])} |", "\n")
                _display(content)


def _final(line: bytes) -> str:
    """Return the visible text of a line with carriage returns."""
    parts = [part for part in _CURSOR.sub(b"", line).split(b"\r") if part]
    return parts[-1].decode(errors="replace") if parts else ""


def _display(content: tuple[Any, ...]) -> None:
    data, metadata, transient, update = content
    options = {"display_id": transient["display_id"]} if "display_id" in transient else {}
    changes = {"update": True} if update else {}
    display(data, metadata=metadata, raw=True, **changes, **options)  # type: ignore[no-untyped-call]
