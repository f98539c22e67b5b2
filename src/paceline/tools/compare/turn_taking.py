"""Turns of the modes: each trains two steps while the others wait, so that other load on the machine hits all equally.

The length of a file tells whose turn it is. Every rank of every mode appends a byte when it has warmed up, and one at
the end of each of its turns, so that the length at which a turn begins is known beforehand. With three modes:

    |  all ranks, warmed up  |  single  |  ddp    |  ddp-torch  |  single  |  ddp    |  …
                             └ turn 0 of each mode, in order    └ turn 1
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass

TURN = 2
"""Optimizer steps of a turn: few, because ratios are medians over the rounds, and the more of these the better."""
NAP_S = 0.01
"""Seconds between two looks at the file: seldom, because whoever has its turn is being timed."""


def turns_of(steps: int) -> int:
    """Return how many turns a mode takes for `steps`; the last one may be shorter."""
    return -(-steps // TURN)


@dataclass(frozen=True)
class Place:
    """A mode's place among those that take turns."""

    file: str
    """Empty at first; all ranks of all modes append to it."""
    before: int
    """Ranks of the modes that go first in each round."""
    ranks: int
    """Ranks of all modes together."""

    def begins_at(self, turn: int) -> int:
        """Return the length of the file at which this mode's turn number `turn` begins, counted from 0."""
        return self.ranks * (1 + turn) + self.before


class Turns:
    """A rank's view of the turns: :meth:`take` waits for the next one, :meth:`end` gives it up."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._taken = 0  # turns of this mode that have begun

    def end(self) -> None:
        """Give the present turn up, or say that this rank has warmed up; the last rank to do so lets others begin."""
        file = os.open(self._place.file, os.O_WRONLY | os.O_APPEND)  # appends of several processes are never lost
        try:
            os.write(file, b".")
        finally:
            os.close(file)

    def take(self) -> None:
        """Wait until the next turn of this mode begins."""
        begins_at = self._place.begins_at(self._taken)
        while os.stat(self._place.file).st_size < begins_at:
            time.sleep(NAP_S)
        self._taken += 1
