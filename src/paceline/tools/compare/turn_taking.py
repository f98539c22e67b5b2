"""Turns of the compared ways: each trains two steps while the others wait, so other load on the machine hits all alike.

The length of a file tells whose turn it is. Every rank appends a byte when it has warmed up, and one at the end of each
of its turns, so the length at which a turn begins is known beforehand. With three ways:

    |  all ranks, warmed up  |  single  |  ddp    |  ddp-torch  |  single  |  ddp    |  …
                             └ turn 0 of each way, in order     └ turn 1
"""

from __future__ import annotations

import os
import time

TURN = 2
"""Optimizer steps in a turn: few, because ratios are medians over the turns."""
NAP_S = 0.01
"""Seconds between two looks at the file: rarely, because another way is being timed."""


def bytes_at_end(ranks: int, steps: int) -> int:
    """Return the length of the file when all `ranks` have taken `steps`; the last turn may be shorter."""
    return ranks * (1 + -(-steps // TURN))


class Turns:
    """One rank's turns.

    Args:
        file: empty at first; all ranks append to it.
        before: number of ranks that go first in each round.
        ranks: number of ranks of all ways together.
    """

    def __init__(self, file: str, before: int, ranks: int) -> None:
        self._file, self._ranks = file, ranks
        self._next = ranks + before  # length of the file at which this rank's next turn begins

    def end(self) -> None:
        """End this turn, or the warm-up; the last rank to do so lets the next way begin."""
        file = os.open(self._file, os.O_WRONLY | os.O_APPEND)  # appends of several processes are never lost
        try:
            os.write(file, b".")
        finally:
            os.close(file)

    def take(self) -> None:
        """Wait until the next turn begins."""
        while os.stat(self._file).st_size < self._next:
            time.sleep(NAP_S)
        self._next += self._ranks
