"""The errors that ranks have reported in their files: read when they end, and before, if they take long to end."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from paceline.launch.failures.root_cause import End, patience, quoted, usage
from paceline.launch.rank.failure_record import read, read_leaving

SLOW_S = 5.0
"""Time after which the error of a rank that still runs is shown."""


def with_report(end: End, path: str) -> End:
    """Return `end` with what the rank has written to its error file."""
    return replace(end, record=read(path), leaving=read_leaving(path))


def await_cause(
    ended: Callable[[], Sequence[End]], running: Callable[[], Sequence[End]], poll: Callable[[], None]
) -> None:
    """Wait while more ranks may fail: those that fail together, or the cause if only consequences have shown.

    The records of running ranks count as well: they may need long to end, or never end.

    Args:
        ended: returns the ranks that have ended.
        running: returns the others, as if the launcher had ended them.
        poll: waits for a moment.
    """
    begin = time.monotonic()
    while still := running():
        told = ended()
        if usage([*told, *still]) is not None or time.monotonic() - begin > patience(told, still):
            return
        poll()


class SlowErrors:
    """Shows once the error of each rank that has raised and still runs, because the others wait without a message.

    Args:
        say: prints a message.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._shown: set[int] = set()

    def show(self, running: Mapping[int, str]) -> None:
        """Show those of the ranks that run, each given with its error file."""
        for rank, path in running.items():
            note = read(path) if rank not in self._shown else None
            if note is not None and time.time() - note.at > SLOW_S:
                self._shown.add(rank)
                trace = "\n".join(quoted(rank, note.trace))
                self._say(f"{trace}\nrank {rank} raised this {SLOW_S:.0f} s ago and still runs")
