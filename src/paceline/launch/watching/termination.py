"""Ends ranks and their child processes: with a signal, and after some time with SIGKILL."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress

from paceline.core.processes.missing_ranks import named_ranks
from paceline.launch.watching.signals import Caught

KILLED_S = 3.0
"""How long the kernel may take to end a killed process."""


class Ending:
    """The end of the ranks of one start.

    Args:
        processes: of all ranks, by rank. Each leads a process group, in which its own children are.
        running: returns the ranks that have not ended.
        poll: waits for a rank to end, for at most the given seconds.
        caught: the signals to the launcher.
        say: tells the user.
    """

    def __init__(
        self,
        processes: Callable[[], Mapping[int, int]],
        running: Callable[[], list[int]],
        poll: Callable[[float], None],
        caught: Caught,
        say: Callable[[str], None],
    ) -> None:
        self._processes, self._running, self._poll, self._caught, self._say = processes, running, poll, caught, say

    def end(
        self, number: signal.Signals, grace: float, failed: Collection[int], heedless: Collection[int], quiet: bool
    ) -> None:
        """Signal the ranks that still run (with SIGKILL if they are `heedless`), and :meth:`wait` for them.

        Args:
            failed: ranks that have failed before.
        """
        running, received = self._running(), len(self._caught.received)
        for rank in running:
            self._signal(rank, signal.SIGKILL if rank in heedless else number)
        for rank in running:  # one that was stopped would not heed it
            self._signal(rank, signal.SIGCONT)
        self.wait(number, grace, failed, quiet, received)

    def wait(
        self,
        number: signal.Signals,
        grace: float,
        failed: Collection[int] = (),
        quiet: bool = False,
        received: int | None = None,
    ) -> None:
        """Wait for the ranks, which got the signal; kill them after `grace` seconds, or when another signal comes.

        Args:
            received: the number of signals to the launcher before; by default until now.
        """
        running, received = self._running(), len(self._caught.received) if received is None else received
        deadline = time.monotonic() + grace
        while self._running() and time.monotonic() < deadline and len(self._caught.received) == received:
            self._poll(0.05)
        stubborn = self._running()
        # A rank's own children go too, also those of a rank that just failed.
        for rank in {*running, *failed}:
            self._signal(rank, signal.SIGKILL)
        deadline = time.monotonic() + KILLED_S
        while self._running() and time.monotonic() < deadline:
            self._poll(0.05)
        if stubborn and not quiet and len(self._caught.received) == received:
            were = "was" if len(stubborn) == 1 else "were"
            self._say(f"{named_ranks(stubborn)} did not end within {grace:.0f} s after {number.name} and {were} killed")

    def _signal(self, rank: int, number: signal.Signals) -> None:
        # It may have ended meanwhile, or have become another user's.
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._processes()[rank], number)
