"""Forks the ranks of a test from the test process, and talks with them until all have come to the end of their part.

    test process                             rank
    1. opens a port, pipes and notes
    2. forks                          ──▶    3. becomes a rank, runs the test's body
    4. waits, looks for deaths        ◀──       "begun", "doomed", "debugging", "raised"
                                      ◀──    5. "ended", with the outcome
    6. kills it with its children

A rank that has come to the end stays until all have, because its end would close connections that others still use.
"""

from __future__ import annotations

import os
import random
import signal
import socket
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from paceline.core.processes.private_store import make_file
from paceline.core.processes.private_store import path_of as path_of_file
from paceline.errors import UsageError
from paceline.launch.loopback import loopback_listener, loopback_store
from paceline.launch.rank.stack_dump import number as stack_signal
from paceline.launch.rank.stack_dump import path_of
from paceline.testing.ranks.child import Connected, be_rank
from paceline.testing.ranks.outcomes import Ending, Outcome, own_frames, position
from paceline.testing.ranks.recorded_collectives import Note

START_S = 120.0
"""Seconds for the ranks to come together."""
GRACE_S = 1.0
"""Seconds for the other ranks, once a rank has failed."""
REPORT_S = 5.0
"""Seconds for a rank to report an exception."""
BRIEF_S = 0.2
"""Seconds for the other ranks, if all of them are in collectives, to which the failed rank does not come any more."""
STUCK_S = 1.0
"""Seconds that a rank is in a collective to which another rank cannot come any more, until that is a deadlock."""
ANSWER_S = 0.5
"""Seconds for a rank to write its stack."""
LOOK_S = 0.05
"""Seconds between two looks for ranks that died."""


@dataclass
class RankProcess:
    """A rank, seen from the test process."""

    pid: int
    pipe: Connection
    note: Note
    ending: Ending
    """The facts about its end that are known so far."""
    begun: float | None = None
    """Time at which it began with the test's body."""
    reports_until: float = 0.0
    """Time until which the report of an exception is awaited."""
    is_debugged: bool = False
    in_call: tuple[str, int] = ("", 0)
    """Group and number of the collective that it was last seen in."""
    in_call_since: float = 0.0

    @property
    def is_over(self) -> bool:
        """Whether the test process need not wait for it any more."""
        return self.ending.outcome is not None or self.ending.code is not None or bool(self.ending.ordered)


@dataclass
class RankRun:
    """One run of a test's body on `size` ranks."""

    size: int
    timeout: float
    """Seconds that ranks may take, from the moment at which all of them have begun with the body."""
    deadlock: str = ""
    """Description of a deadlock, because of which the remaining ranks were not awaited; empty without one."""
    processes: list[RankProcess] = field(default_factory=list)
    _start: float = 0.0
    _debugging: float = 0.0
    """Seconds in debuggers, which do not count for timeouts."""
    _may_debug: bool = True
    """Whether no rank has been debugged yet: there is one terminal."""

    def __call__(self, body: Callable[[Connected], Outcome], harvest: Callable[[Path], None]) -> list[Ending]:
        """Run `body` on every rank and return how they ended.

        Calls `harvest` when they have, with the folder in which they may have left files.
        """
        check_fork()
        with (
            tempfile.TemporaryDirectory(prefix="paceline-test-", ignore_cleanup_errors=True) as folder,
            _stores() as (listener, private),
        ):
            self._start = time.monotonic()
            try:
                for rank in range(self.size):
                    self._fork(rank, body, Path(folder), listener, private)
                store = loopback_store(listener=listener)  # after the forks, because it starts threads
                self._converse()
                self._ask_for_stacks(Path(folder))
            finally:
                for process in self.processes:
                    kill(process)
                for process in self.processes:
                    reap(process)
            del store
            harvest(Path(folder))
        return [process.ending for process in self.processes]

    def _fork(self, rank: int, body: Callable[[Connected], Outcome], folder: Path, listener: Any, private: str) -> None:
        ours, theirs = Pipe()
        note, drawn = Note(), random.getstate()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of Python 3.12, which counts threads
            pid = os.fork()
        if pid == 0:
            port = listener.getsockname()[1]
            # Or the pipes of other ranks would stay open in this one after their ends.
            for inherited in (listener, ours, *(process.pipe for process in self.processes)):
                inherited.close()
            connected = Connected(rank, self.size, port, private, theirs, note, folder, drawn)
            be_rank(body, connected)  # which never returns
        theirs.close()
        with suppress(OSError):
            os.setpgid(pid, pid)  # the rank does it, too; whoever is first, it can be killed as a group from now on
        self.processes.append(RankProcess(pid, ours, note, Ending(rank)))

    def _converse(self) -> None:
        """Hear the ranks until all are over, or there is a reason not to wait any longer."""
        looked = self._start
        while waiting := [process for process in self.processes if not process.is_over]:
            ready = wait([process.pipe for process in waiting], LOOK_S)
            for process in waiting:
                if process.pipe in ready:
                    self._receive(process)
            now = time.monotonic()
            if any(process.is_debugged for process in self.processes):
                self._debugging += now - looked
            elif now - looked > LOOK_S / 2 or not ready:
                for process in waiting:
                    self._check_death(process)
                if self._is_hopeless(now):
                    return
            else:
                continue
            looked = now

    def _receive(self, process: RankProcess) -> None:
        try:
            self._take(process, *process.pipe.recv())
        except (EOFError, OSError):
            self._check_death(process, patience=5.0)

    def _take(self, process: RankProcess, what: str, value: Any) -> None:
        if what == "begun":
            process.begun = time.monotonic()
        elif what == "raised":
            process.reports_until = time.monotonic() + REPORT_S
        elif what == "doomed":
            process.ending.ordered = value
        elif what == "may I debug?":
            process.is_debugged, self._may_debug = self._may_debug, False
            process.pipe.send(process.is_debugged)
        elif what == "debugging":
            process.is_debugged = value
        elif what == "ended":
            process.ending.outcome = value
            process.ending.when = time.monotonic() - self._start
            process.is_debugged = False

    def _check_death(self, process: RankProcess, patience: float = 0.0) -> None:
        deadline = time.monotonic() + patience
        while process.ending.code is None:
            pid, status = os.waitpid(process.pid, os.WNOHANG)
            if pid or time.monotonic() >= deadline:
                break
            time.sleep(0.005)
        else:
            return
        if not pid:
            return
        with suppress(EOFError, OSError):  # its last messages
            while not process.is_over and process.pipe.poll():
                self._take(process, *process.pipe.recv())
        process.ending.code = os.waitstatus_to_exitcode(status)
        process.ending.when = time.monotonic() - self._start
        process.is_debugged = False

    def _is_hopeless(self, now: float) -> bool:
        """Return whether waiting any longer is useless."""
        failures = [
            process.ending.when
            for process in self.processes
            if (process.ending.code is not None and not process.ending.ordered)
            or (process.ending.outcome is not None and process.ending.outcome.kind in ("failed", "exit"))
        ]
        if failures and now > self._start + min(failures) + (BRIEF_S if self._only_collectives() else GRACE_S):
            return all(process.is_over or now > process.reports_until for process in self.processes)
        begins = [process.begun for process in self.processes if process.begun is not None]
        latest = self._start + START_S if len(begins) < self.size else max(begins) + self.timeout
        return now > latest + self._debugging or self._is_deadlocked(now)

    def _only_collectives(self) -> bool:
        """Return whether all ranks that are not over wait in collectives."""
        return all(process.is_over or process.note.read().get("inside") for process in self.processes)

    def _is_deadlocked(self, now: float) -> bool:
        """Return whether a rank is in a collective to which one that has come to the end was to come before."""
        for process in self.processes:
            call = process.note.read()
            if process.is_over or not call.get("inside"):
                process.in_call = ("", 0)
                continue
            if process.in_call != (call["group"], call["number"]):
                process.in_call, process.in_call_since = (call["group"], call["number"]), now
            if now - process.in_call_since < STUCK_S or not call["number"] or call["call"] in ("send", "recv"):
                continue
            for other in self.processes:
                outcome = other.ending.outcome
                if outcome is None or other.ending.rank not in call["ranks"]:
                    continue
                made = outcome.calls.get(call["group"])
                if made is None or (not made.has_failed and len(made.calls) < call["number"]):
                    self.deadlock = f"rank {other.ending.rank} never came to a collective"
                    return True
        return False

    def _ask_for_stacks(self, folder: Path) -> None:
        """Ask the ranks that are not over for their stacks; add the stacks that dying ones left."""
        asked = [process for process in self.processes if not process.is_over]
        for process in asked if stack_signal() else []:
            with suppress(OSError):
                os.kill(process.pid, stack_signal())
        deadline = time.monotonic() + ANSWER_S
        while time.monotonic() < deadline and not all(_stack(folder, process) for process in asked):
            time.sleep(0.01)
        if asked:
            time.sleep(0.05)  # for the rest of a stack
        for process in self.processes:
            process.ending.stack = own_frames(_stack(folder, process))
        for process in asked:
            process.ending.doing = position(process.note.read(), process.ending.stack, process.begun is not None)
            process.ending.when = time.monotonic() - self._start


@contextmanager
def _stores() -> Iterator[tuple[socket.socket, str]]:
    """Open the port of the ranks' store; yield it with the value of ``PACELINE_STORE`` for ranks on one host."""
    # The port is opened before the forks, so that it is known to all ranks and cannot be taken by others.
    with loopback_listener() as listener:
        port = listener.getsockname()[1]
        if sys.platform != "linux":
            yield listener, ""
            return
        memory = make_file(str(port))
        try:
            yield listener, f"{port} {path_of_file(memory)}"
        finally:
            os.close(memory)


def kill(process: RankProcess) -> None:
    """Kill a rank and everything that it has started."""
    with suppress(OSError):
        os.killpg(process.pid, signal.SIGKILL)
    if process.ending.code is None:
        with suppress(OSError):  # it has left its process group, to have the terminal
            os.kill(process.pid, signal.SIGKILL)


def reap(process: RankProcess) -> None:
    """Wait for the end of a rank that was killed, and close its pipe."""
    if process.ending.code is None:
        with suppress(ChildProcessError):
            os.waitpid(process.pid, 0)
    process.pipe.close()


def check_fork() -> None:
    """Raise unless forks of this process can be ranks."""
    if dist.is_initialized():
        raise UsageError(
            "the test process itself is in a process group, which ranks would inherit; let the test or fixture that "
            "made it call torch.distributed.destroy_process_group()"
        )
    if torch.cuda.is_initialized():
        raise UsageError(
            "an earlier test or an import has used CUDA in the test process, and a fork cannot use it any more; run "
            "the tests with ranks by themselves: pytest -m ranks"
        )


def _stack(folder: Path, process: RankProcess) -> str:
    try:
        return path_of(folder, process.ending.rank).read_text(errors="replace").strip()
    except OSError:
        return ""
