"""The processes of the ranks of one start, and how they ended."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import wait
from typing import Any, cast

from paceline.core.missing_ranks import named_ranks
from paceline.launch.failure_record import read, read_leaving
from paceline.launch.root_cause import UNKNOWN, End, once, patience, usage
from paceline.launch.signals import Caught

SLOW_S = 5.0
"""An error that a rank raised this many seconds ago is shown even if the rank is still running."""
KILLED_S = 3.0
"""Seconds that the kernel has to end a killed process."""


class RankProcesses:
    """The processes of the ranks of one start on this host.

    Args:
        processes: each rank's process, a ``Popen`` or a ``ForkedRank``.
        error_files: the path of each rank's error file.
        note_failure: called after a rank has failed.
    """

    def __init__(
        self, processes: Mapping[int, Any], error_files: Mapping[int, str], note_failure: Callable[[], None]
    ) -> None:
        self.ends: dict[int, End] = {}
        """How ranks ended, by rank; filled as they exit."""
        self.signalled: set[int] = set()
        """Ranks that the launcher has signaled to exit."""
        self._processes, self._error_files, self._note_failure = processes, error_files, note_failure
        self._shown: set[int] = set()  # ranks whose errors were shown while they were running
        self._watched: dict[int, int] = {}  # rank -> pidfd, readable once the rank has exited
        if hasattr(os, "pidfd_open"):
            with suppress(OSError):  # an old kernel: the ranks are polled instead
                for rank, process in processes.items():
                    self._watched[rank] = os.pidfd_open(process.pid)

    def poll(self, timeout: float = 0.0) -> None:
        """Wait up to `timeout` seconds for a rank to exit, and record which ranks have exited."""
        running = self.running()
        if all(rank in self._watched for rank in running):
            wait([self._watched[rank] for rank in running], timeout)
        else:
            time.sleep(min(timeout, 0.05))
        for rank in running:
            code = exit_code(self._processes[rank])
            if code is not None:
                self.ends[rank] = End(rank, code, time.time(), rank in self.signalled)
                if code != 0:
                    self._note_failure()

    def running(self) -> list[int]:
        """Return the running ranks."""
        return [rank for rank in self._processes if rank not in self.ends]

    def failed(self) -> list[int]:
        """Return the ranks that have exited with an error or were killed by a signal."""
        return [rank for rank, end in self.ends.items() if end.code != 0]

    def pids(self) -> dict[int, int]:
        """Return the process ids of the running ranks."""
        return {rank: self._processes[rank].pid for rank in self.running()}

    def reported_ends(self) -> list[End]:
        """Return how each rank that has exited ended, with its report."""
        return [self._with_report(end) for end in self.ends.values()]

    def ends_of_running(self) -> list[End]:
        """Return an :class:`End` for each running rank as if the launcher had terminated it, with its report."""
        return [self._with_report(End(rank, 1, time.time(), stopped=True)) for rank in self.running()]

    def _with_report(self, end: End) -> End:
        path = self._error_files[end.rank]
        return replace(end, record=read(path), leaving=read_leaving(path))

    def await_cause(self, is_stopped: Callable[[], bool]) -> None:
        """Wait for other ranks that fail at the same time or, if only consequences are known, for the cause.

        A rank that has reported an error may still take long to exit. Returns as soon as `is_stopped()` is true.
        """
        begin = time.monotonic()
        while self.running() and not is_stopped():
            ended, running = self.reported_ends(), self.ends_of_running()
            is_mistake = usage([*ended, *running]) is not None
            if is_mistake or time.monotonic() - begin > patience(ended, running):
                return
            self.poll(0.02)

    def show_slow_errors(self, say: Callable[[str], None], shown: set[object]) -> None:
        """Show errors that ranks raised a while ago if those ranks are still running and keep the others waiting."""
        for rank in self.running():
            record = read(self._error_files[rank]) if rank not in self._shown else None
            if record is not None and time.time() - record.at > SLOW_S:
                self._shown.add(rank)
                trace = "\n".join(once(rank, record.trace, shown))
                say(f"{trace}\nrank {rank} raised this {SLOW_S:.0f} s ago and is still running")

    def send(self, rank: int, number: signal.Signals) -> None:
        """Send a signal to a rank and its child processes, even if the rank itself has exited."""
        # Each rank leads a process group. The group's id may have been reused by another user's process.
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._processes[rank].pid, number)

    def close(self) -> None:
        """Stop watching the processes."""
        for descriptor in self._watched.values():
            os.close(descriptor)
        self._watched = {}


def exit_code(process: Any) -> int | None:
    """Return the exit code of a ``Popen`` or a ``ForkedRank``: None while it runs, :data:`UNKNOWN` if it is lost."""
    if isinstance(process, subprocess.Popen) and process.returncode is None:
        try:
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:  # discarded, or taken by another wait(); poll() would return 0
            process.returncode = UNKNOWN
    return cast("int | None", process.poll())


class Ending:
    """Terminates the ranks of one start.

    Args:
        ranks: the processes of the ranks.
        caught: the signals to the launcher.
        say: prints a message.
    """

    def __init__(self, ranks: RankProcesses, caught: Caught, say: Callable[[str], None]) -> None:
        self._ranks, self._caught, self._say = ranks, caught, say

    def end(
        self, number: signal.Signals, grace: float, without_grace: Collection[int] = (), quiet: bool = False
    ) -> None:
        """Signal the running ranks and :meth:`wait` for them. Ranks in `without_grace` get SIGKILL."""
        running, received = self._ranks.running(), len(self._caught.received)
        self._ranks.signalled.update(running)
        for rank in running:
            self._ranks.send(rank, signal.SIGKILL if rank in without_grace else number)
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
