"""Ends ranks and their child processes: with a signal, and after some time with another one."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from paceline.core.processes.missing_ranks import named_ranks
from paceline.launch.watching.signals import Caught

KILLED_S = 3.0
"""How long the kernel may take to end a killed process."""
SETTLED_S, ASLEEP_S = 0.05, 0.2
"""When a main thread has handled a signal that it got, and how long one sleeps that did not get it. Together less than
the time within which a rank takes two signals for one (``ECHO_S``)."""


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
        running, received = self._running(), len(self._caught.received)
        # Stopped first, so that all get the signal before one of them can complain of a peer that is gone.
        for each in (signal.SIGSTOP, number, signal.SIGCONT):
            for rank in running:
                self._signal(rank, signal.SIGKILL if each is number and rank in heedless else each)
        self._wake_sleepers(number)
        self.wait(number, grace, failed, quiet, received)

    def _wake_sleepers(self, number: signal.Signals) -> None:
        """Signal again the ranks whose main thread sleeps, because another thread took the signal.

        Any thread of a stopped process may take it when it goes on. Python's handler waits for the main thread then,
        which nothing wakes from a sleep.
        """
        self._poll(SETTLED_S)
        asleep = {rank: turns for rank in self._running() if (turns := self._turns_of(rank))}
        deadline = time.monotonic() + ASLEEP_S
        while asleep and asleep.keys() & {*self._running()} and time.monotonic() < deadline:
            self._poll(SETTLED_S)
            asleep = {rank: turns for rank, turns in asleep.items() if self._turns_of(rank) == turns}
        for rank in asleep.keys() & {*self._running()}:
            self._signal(rank, number)

    def _turns_of(self, rank: int) -> list[str]:
        """Return how often the rank's main thread has left a core; nothing where that is not known, or it runs."""
        process = self._handlers()[rank].proc.pid
        with suppress(OSError):
            lines = Path(f"/proc/{process}/task/{process}/status").read_text().splitlines()
            if any(line.startswith("State:\tS") for line in lines):
                return [line for line in lines if "ctxt_switches" in line]
        return []

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
