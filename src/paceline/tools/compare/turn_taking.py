"""Turns of the compared variants: one trains two steps while the others wait, so machine load affects all equally.

The turns are passed on through a shared file. Every rank appends one byte after its warm-up and one after each of its
turns, and begins its next turn when the file has reached a certain length. With three variants:

    |  all ranks, warmed up  |  single  |  ddp    |  ddp-torch  |  single  |  ddp    |  …
                             └ turn 0 of each variant in order  └ turn 1
"""

from __future__ import annotations

import os
import time

TURN = 2
"""Optimizer steps in a turn. Short turns give more ratios for the median."""
NAP_S = 0.01
"""Polling interval in seconds."""


class Turns:
    """The turns of one rank.

    Args:
        file: path of a file that all ranks share, empty at first.
        before: number of ranks whose turns come earlier in each round.
        ranks: number of ranks of all variants.
    """

    def __init__(self, file: str, offset: int, ranks: int) -> None:
        self._file, self._ranks = file, ranks
        self._next = ranks + offset
        """File length at which this rank's next turn begins."""

    def end(self) -> None:
        """End this turn or the warm-up. The next variant begins when all ranks of this variant have ended theirs."""
        with open(self._file, "ab") as file:  # appends from several processes are never lost
            file.write(b".")

    def take(self) -> None:
        """Wait until the next turn begins."""
        while os.stat(self._file).st_size < self._next:
            time.sleep(NAP_S)
        self._next += self._ranks
