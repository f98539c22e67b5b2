"""Ends ranks and their child processes with a signal, and later with SIGKILL."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress

from paceline.core.processes.missing_ranks import named_ranks
from paceline.launch.watching.signals import Caught

KILLED_S = 3.0
"""Seconds for the kernel to end a killed process."""


class Ending:
    """The end of the ranks of one start.

    Args:
        processes: returns the process ids of all ranks. Each rank leads a process group with its child processes.
        running: returns the running ranks.
        poll: waits up to the given seconds for a rank to end.
        caught: the signals to the launcher.
        say: prints a message.
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
        """Signal the running ranks (`heedless` ones with SIGKILL) and :meth:`wait` for them."""
        running, received = self._running(), len(self._caught.received)
        for rank in running:
            self._signal(rank, signal.SIGKILL if rank in heedless else number)
        for rank in running:  # a stopped process does not handle the signal
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
        """Wait for the signalled ranks; kill them after `grace` seconds, or when the launcher gets another signal.

        Args:
            failed: ranks that have failed, whose child processes are killed.
            received: number of earlier signals to the launcher; by default all so far.
        """
        running, received = self._running(), len(self._caught.received) if received is None else received
        deadline = time.monotonic() + grace
        while self._running() and time.monotonic() < deadline and len(self._caught.received) == received:
            self._poll(0.05)
        stubborn = self._running()
        # With the child processes, also of ranks that have failed.
        for rank in {*running, *failed}:
            self._signal(rank, signal.SIGKILL)
        deadline = time.monotonic() + KILLED_S
        while self._running() and time.monotonic() < deadline:
            self._poll(0.05)
        if stubborn and not quiet and len(self._caught.received) == received:
            were = "was" if len(stubborn) == 1 else "were"
            self._say(f"{named_ranks(stubborn)} did not end within {grace:.0f} s after {number.name} and {were} killed")

    def _signal(self, rank: int, number: signal.Signals) -> None:
        # The process may have ended, and its id may belong to another user's.
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._processes()[rank], number)
