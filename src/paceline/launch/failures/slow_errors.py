"""Errors of ranks that have raised and still run; they are shown, because the others wait without a message."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from paceline.launch.failures.root_cause import quoted
from paceline.launch.rank.failure_record import read

SLOW_S = 5.0
"""Time after which such an error is shown."""


class SlowErrors:
    """Shows the error of each such rank once.

    Args:
        say: prints a message.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._shown: set[int] = set()
        """Ranks whose error was shown before they ended."""

    def show(self, running: Mapping[int, str]) -> None:
        """Show those of the ranks that run, each given with its error file."""
        for rank, path in running.items():
            note = read(path) if rank not in self._shown else None
            if note is not None and time.time() - note.at > SLOW_S:
                self._shown.add(rank)
                trace = "\n".join(quoted(rank, note.trace))
                self._say(f"{trace}\nrank {rank} raised this {SLOW_S:.0f} s ago and still runs")
