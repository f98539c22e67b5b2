"""Ends ranks and their child processes: with a signal, and after some time with another one."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from typing import Any

from paceline.core.processes.missing_ranks import named_ranks
from paceline.launch.watching.signals import Caught

KILLED_S = 3.0
"""How long the kernel may take to end a killed process."""


class Ending:
    """The end of the ranks of one job.

    Args:
        handlers: returns torchelastic's handlers of the ranks, by rank.
        running: returns the ranks that have not ended.
        poll: waits for a rank to end, for at most the given seconds.
        caught: the signals to the launcher.
        say: tells the user.
    """

    def __init__(
        self,
        handlers: Callable[[], Mapping[int, Any]],
        running: Callable[[], list[int]],
        poll: Callable[[float], None],
        caught: Caught,
        say: Callable[[str], None],
    ) -> None:
        self._handlers, self._running, self._poll, self._caught, self._say = handlers, running, poll, caught, say

    def end(
        self, number: signal.Signals, grace: float, failed: Collection[int], heedless: Collection[int], quiet: bool
    ) -> None:
        """Signal the ranks that still run (with SIGKILL if they are `heedless`), and :meth:`wait` for them.

        Args:
            failed: ranks that have failed before.
        """
        running = self._running()
        # Stopped first, so that all get the signal before one of them can complain of a peer that is gone.
        for each in (signal.SIGSTOP, number, signal.SIGCONT):
            for rank in running:
                self._signal(rank, signal.SIGKILL if each is number and rank in heedless else each)
        self.wait(number, grace, failed, quiet)

    def wait(self, number: signal.Signals, grace: float, failed: Collection[int] = (), quiet: bool = False) -> None:
        """Wait for the ranks, which got the signal; kill them after `grace` seconds, or when another signal comes."""
        running, received = self._running(), len(self._caught.received)
        deadline = time.monotonic() + grace
        while self._running() and time.monotonic() < deadline and len(self._caught.received) == received:
            self._poll(0.05)
        stubborn = self._running()
        # A rank's own children are in its process group; they go too, also those of a rank that just failed.
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
            if sys.platform == "win32":
                self._handlers()[rank].proc.send_signal(number)
            else:
                os.killpg(self._handlers()[rank].proc.pid, number)
