"""Errors in the ranks' error files, read when ranks end, and before if they take long to end."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from paceline.launch.failures.root_cause import End, patience, quoted, usage
from paceline.launch.rank.failure_record import read, read_leaving

SLOW_S = 5.0
"""Seconds until the error of a rank that still runs is shown."""


def with_report(end: End, path: str) -> End:
    """Return `end` with the content of the rank's error file."""
    return replace(end, record=read(path), leaving=read_leaving(path))


def await_cause(
    ended: Callable[[], Sequence[End]], running: Callable[[], Sequence[End]], poll: Callable[[], None]
) -> None:
    """Wait for ranks that fail together or, if only consequences are known, for the cause.

    A running rank may already have reported an error, and take long to end.

    Args:
        ended: returns the ends of ranks that have ended.
        running: returns ends of the other ranks, as if the launcher had ended them.
        poll: waits for a moment.
    """
    begin = time.monotonic()
    while still_running := running():
        ends = ended()
        is_mistake = usage([*ends, *still_running]) is not None
        if is_mistake or time.monotonic() - begin > patience(ends, still_running):
            return
        poll()


class SlowErrors:
    """Shows the error of each rank that has raised and still runs, while the other ranks wait for it.

    Args:
        say: prints a message.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._shown: set[int] = set()

    def show(self, running: Mapping[int, str]) -> None:
        """Show new errors of running ranks, given their error files."""
        for rank, path in running.items():
            record = read(path) if rank not in self._shown else None
            if record is not None and time.time() - record.at > SLOW_S:
                self._shown.add(rank)
                trace = "\n".join(quoted(rank, record.trace))
                self._say(f"{trace}\nrank {rank} raised this {SLOW_S:.0f} s ago and still runs")
