"""Sends a message to ranks and handles output, deaths, hangs and interrupts until they have answered."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from typing import Any

from paceline.core.process_status import busy_seconds
from paceline.core.processes.missing_ranks import named_ranks
from paceline.launch.watching import stack_requests
from paceline.launch.watching.signals import Caught
from paceline.tools.notebook.kernel.hang_detection import Wait, wait_in
from paceline.tools.notebook.kernel.output import Screen
from paceline.tools.notebook.kernel.processes import Processes
from paceline.tools.notebook.messages import Failure

LOOK_S = 0.1
"""Polling interval in seconds."""
STUCK_S = 2.0
"""Seconds without output before stacks are read, and seconds until they are read again."""
HEED_S = 5.0
"""Seconds to wait before killing a rank that ignores an interrupt."""
IDLE = 0.2
"""A process counts as asleep if it uses or wants a core for less than this share of the time."""


@dataclass
class Outcome:
    """Answers of the ranks, by rank."""

    results: dict[int, Any] = field(default_factory=dict)
    failures: dict[int, Failure] = field(default_factory=dict)
    deaths: dict[int, str] = field(default_factory=dict)
    """How processes ended."""
    killed: set[int] = field(default_factory=set)
    """Ranks that ignored an interrupt."""
    waits: dict[int, str] = field(default_factory=dict)
    """The call of each rank that was interrupted while waiting, and the ranks it waited for."""
    interrupted: bool = False

    @property
    def breaks_group(self) -> bool:
        """Whether ranks may have run different collectives."""
        is_broken = any(failure.breaks_group or failure.is_interrupt for failure in self.failures.values())
        return is_broken or bool(self.deaths or self.waits) or self.interrupted


class Conversation:
    """Sends one message to some of the ranks, and serves them until all have answered or ended."""

    def __init__(self, processes: Processes, ranks: Sequence[int], screen: Screen | None = None) -> None:
        self._processes, self._ranks, self._screen = processes, list(ranks), screen
        self._running: list[int] = []
        """Ranks that have not answered yet, in order."""
        self.outcome = Outcome()
        self._changed = self._looked = 0.0
        """When a rank last sent a message or output, and when stacks were last requested."""
        self._seen: dict[int, tuple[Wait, float]] = {}
        """Each rank's waiting call and busy seconds when stacks were last requested."""
        self._caught = Caught((signal.SIGINT,))

    def hold(self, *message: Any, seconds: float | None = None) -> Outcome:
        """Send `message` and return the answers. Ranks that have not answered after `seconds` are killed."""
        deadline = None if seconds is None else time.monotonic() + seconds
        with self._caught:
            self._changed = self._looked = time.monotonic()
            for rank in self._ranks:
                with suppress(OSError):  # a dead rank is noticed by _poll()
                    self._processes.ranks[rank].connection.send(message)
                self._running.append(rank)
            while self._running:
                self._poll()
                if self._caught.received:
                    self.outcome.interrupted = True
                    self._stop()
                elif deadline is not None and time.monotonic() > deadline:
                    self._kill(self._running)
                elif self._screen is not None:
                    self._look_for_waits()
        if self._screen is not None:
            self._screen.finish()
        return self.outcome

    # -- messages of ranks --------------------------------------------------------------------------------------

    def _poll(self) -> None:
        """Handle messages and output of the ranks, waiting at most :data:`LOOK_S`."""
        running = {rank: self._processes.ranks[rank] for rank in self._running}
        sources: list[Any] = [source for process in running.values() for source in (process.connection, process.output)]
        ready = wait(sources, LOOK_S)
        for rank, process in running.items():
            if process.output in ready:
                self._take_output(rank)
            if process.connection in ready:
                self._take_message(rank)
        # Check for deaths after reading messages, because a rank may have answered before it died.
        for rank in list(self._running):
            if (end := self._processes.end_of(rank)) is not None:
                self.outcome.deaths.setdefault(rank, end)
                self._ended(rank)
        if self._screen is not None:
            self._screen.show()

    def _take_output(self, rank: int) -> None:
        printed = self._processes.ranks[rank].read()
        if printed:
            self._changed = time.monotonic()
        if self._screen is not None:
            self._screen.take(rank, printed)

    def _take_message(self, rank: int) -> None:
        try:
            kind, *content = self._processes.ranks[rank].connection.recv()
        except (EOFError, OSError):  # the rank is exiting, or a cell has closed the connection
            self._processes.ranks[rank].kill()
            return
        self._changed = time.monotonic()
        self._take_output(rank)  # show output printed before this message first
        if kind == "done":
            result, failure = content
            self.outcome.results[rank] = result
            if failure is not None:
                self.outcome.failures[rank] = failure
            self._ended(rank)
        elif self._screen is not None and kind == "display":
            self._screen.display(rank, tuple(content))
        elif self._screen is not None:
            self._screen.clear(rank, content[0])

    def _ended(self, rank: int) -> None:
        self._take_output(rank)
        self._running.remove(rank)
        self._changed = time.monotonic()
        if self._screen is not None:
            self._screen.end(rank)

    # -- ranks that hang ----------------------------------------------------------------------------------------

    def _look_for_waits(self) -> None:
        """Interrupt ranks that wait for ranks that are not running the cell.

        The stacks are read twice. A rank counts as hanging if it is in the same call both times and, if that call may
        also compute, was asleep in between. A rank that waits for a core is not asleep.
        """
        now = time.monotonic()
        idle = [rank for rank in range(self._processes.start.nproc) if rank not in self._running]
        if not idle or now - max(self._changed, self._looked) < STUCK_S or not self._running:
            return
        pids = {rank: self._processes.ranks[rank].pid for rank in self._running}
        stacks = stack_requests.request_stacks(self._processes.boxes.path, pids)
        waits = {rank: call for rank, text in stacks.items() if (call := wait_in(text)) is not None}
        previous, passed = self._seen, now - self._looked
        self._seen = {rank: (waits[rank], busy_seconds(pids[rank])) for rank in waits}
        self._looked = now
        if self._seen.keys() != pids.keys() or not all(
            rank in previous
            and previous[rank][0] == call
            and (call.is_sure or 0 <= busy - previous[rank][1] < IDLE * passed)
            for rank, (call, busy) in self._seen.items()
        ):
            return
        for rank, call in waits.items():
            self.outcome.waits[rank] = f"waited in {call} for {self._named(idle)}"
        self._stop()

    def _named(self, idle: list[int]) -> str:
        """Return the ranks that do not run the cell, with reasons."""
        reasons: dict[str, list[int]] = {}
        for rank in idle:
            if rank in self.outcome.deaths:
                reason = "died"
            elif rank not in self._ranks:
                reason = "did not run this cell"
            elif rank in self.outcome.failures:
                reason = f"had raised {self.outcome.failures[rank].name}"
            else:
                reason = "had finished the cell"
            reasons.setdefault(reason, []).append(rank)
        return " and ".join(f"{named_ranks(ranks)}, which {reason}" for reason, ranks in reasons.items())

    def _stop(self) -> None:
        """Interrupt the running ranks and kill them if they ignore it. A second interrupt kills them at once."""
        received = len(self._caught.received)
        for rank in self._running:
            with suppress(ProcessLookupError):
                os.kill(self._processes.ranks[rank].pid, signal.SIGINT)
        # Kill only the last rank first, because that may unblock the others, which then keep their variables.
        for victims in (slice(-1, None), slice(None)):
            deadline = time.monotonic() + HEED_S
            while self._running and time.monotonic() < deadline and len(self._caught.received) == received:
                self._poll()
            self._kill(self._running[victims])
        while self._running:
            self._poll()

    def _kill(self, ranks: Sequence[int]) -> None:
        for rank in list(ranks):
            self.outcome.killed.add(rank)
            self._processes.ranks[rank].kill()
