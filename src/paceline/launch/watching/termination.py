"""Terminates ranks and their child processes with a signal, and if necessary with SIGKILL."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Collection

from paceline.core.processes.missing_ranks import named_ranks
from paceline.launch.watching.rank_processes import RankProcesses
from paceline.launch.watching.signals import Caught

KILLED_S = 3.0
"""Seconds that the kernel has to end a killed process."""


class Ending:
    """Terminates the ranks of one start.

    Args:
        ranks: the processes of the ranks.
        caught: the signals to the launcher.
        say: prints a message.
    """

    def __init__(self, ranks: RankProcesses, caught: Caught, say: Callable[[str], None]) -> None:
        self._ranks, self._caught, self._say = ranks, caught, say

    def end(self, number: signal.Signals, grace: float, heedless: Collection[int] = (), quiet: bool = False) -> None:
        """Signal the running ranks and :meth:`wait` for them. `heedless` ranks get SIGKILL."""
        running, received = self._ranks.running(), len(self._caught.received)
        self._ranks.signalled.update(running)
        for rank in running:
            self._ranks.send(rank, signal.SIGKILL if rank in heedless else number)
        for rank in running:  # a stopped process does not handle the signal
            self._ranks.send(rank, signal.SIGCONT)
        self.wait(number, grace, quiet, received)

    def wait(self, number: signal.Signals, grace: float, quiet: bool = False, received: int | None = None) -> None:
        """Wait for the signaled ranks; kill them after `grace` seconds, or when the launcher gets another signal.

        Args:
            received: number of earlier signals to the launcher, which do not count; by default, all received so far.
        """
        ranks, received = self._ranks, len(self._caught.received) if received is None else received
        running, failed = ranks.running(), ranks.failed()
        deadline = time.monotonic() + grace
        while ranks.running() and time.monotonic() < deadline and len(self._caught.received) == received:
            ranks.poll(0.05)
        stubborn = ranks.running()
        # This also kills child processes, including the children of ranks that failed earlier.
        for rank in {*running, *failed}:
            ranks.send(rank, signal.SIGKILL)
        deadline = time.monotonic() + KILLED_S
        while ranks.running() and time.monotonic() < deadline:
            ranks.poll(0.05)
        if stubborn and not quiet and len(self._caught.received) == received:
            were = "was" if len(stubborn) == 1 else "were"
            self._say(f"{named_ranks(stubborn)} did not end within {grace:.0f} s after {number.name} and {were} killed")
