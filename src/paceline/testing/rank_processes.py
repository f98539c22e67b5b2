"""Forks the ranks of a test from the test process, and communicates with them until all have finished.

    test process                             rank
    1. opens a port, pipes and notes
    2. forks                          ──▶    3. becomes a rank, runs the test's body
    4. waits, looks for deaths        ◀──       "begun", "doomed", "debugging", "raised"
                                      ◀──    5. "ended", with the outcome
    6. kills it with its child processes

A rank that has finished waits for the others, because its exit would close connections that they still use.
"""

from __future__ import annotations

import os
import random
import signal
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from paceline.errors import UsageError
from paceline.launch.loopback import loopback_listener, loopback_store
from paceline.launch.rank.stack_dump import number as stack_signal
from paceline.launch.rank.stack_dump import path_of
from paceline.testing.ranks.child import Connected, be_rank
from paceline.testing.ranks.outcomes import Ending, Outcome, own_frames, position
from paceline.testing.ranks.recorded_collectives import ONE_TO_ONE, Note

START_S = 120.0
"""Seconds that ranks may take to start."""
GRACE_S = 1.0
"""Seconds to wait for the other ranks after a rank has failed."""
REPORT_S = 5.0
"""Seconds that a rank may take to report an exception."""
BRIEF_S = 0.2
"""Replaces `GRACE_S` if all other ranks are in collectives, which the failed rank can no longer join."""
STUCK_S = 1.0
"""Seconds until a collective that another rank can no longer join counts as a deadlock."""
ANSWER_S = 0.5
"""Seconds that a rank may take to write its stack."""
LOOK_S = 0.05
"""Seconds between two checks for dead ranks."""
TOO_LATE = (
    "an earlier test, a fixture or an import has used a GPU in the test process, or has run a backward pass while a "
    "GPU was visible, so its forks cannot; run the tests with ranks separately (pytest -m ranks) or, if they need no "
    "GPU, hide the GPUs (CUDA_VISIBLE_DEVICES= pytest)"
)
"""Message about ranks that torch does not let use a GPU or autograd."""


@dataclass
class RankProcess:
    """A rank, seen from the test process."""

    pid: int
    pipe: Connection
    note: Note
    ending: Ending
    """What is known about how the rank ended."""
    begun: float | None = None
    """Time when the test body started on this rank; None before that."""
    reports_until: float = 0.0
    """Deadline for the rank to report an exception."""
    is_debugged: bool = False

    @property
    def is_over(self) -> bool:
        """Whether the rank has ended, so the test process no longer waits for it."""
        return self.ending.outcome is not None or self.ending.code is not None or bool(self.ending.ordered)


@dataclass
class RankRun:
    """One run of a test's body on `size` ranks."""

    size: int
    timeout: float
    """Seconds that ranks may take once the body has begun on all of them."""
    deadlock: str = ""
    """Description of a deadlock that ended the wait; empty if there was none."""
    processes: list[RankProcess] = field(default_factory=list)
    _start: float = 0.0
    _debugging: float = 0.0
    """Seconds spent in debuggers, which do not count toward timeouts."""
    _may_debug: bool = True
    """Whether no rank has used the debugger yet. Only one may, because there is only one terminal."""

    def __call__(self, body: Callable[[Connected], Outcome], harvest: Callable[[Path], None]) -> list[Ending]:
        """Run `body` on every rank and return how the ranks ended.

        Finally, call `harvest` with the folder that contains the ranks' files.
        """
        check_fork()
        if signal.getsignal(signal.SIGCHLD) == signal.SIG_IGN:  # otherwise the ranks' exit codes are lost
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        with (
            tempfile.TemporaryDirectory(prefix="paceline-test-", ignore_cleanup_errors=True) as folder,
            loopback_listener() as listener,  # before the forks, so that all ranks know the port
        ):
            self._start = time.monotonic()
            try:
                for rank in range(self.size):
                    self._fork(rank, body, Path(folder), listener)
                store = loopback_store(listener=listener)  # started only after the forks, because it starts threads
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

    def _fork(self, rank: int, body: Callable[[Connected], Outcome], folder: Path, listener: Any) -> None:
        parent_end, rank_end = Pipe()
        note, drawn = Note(), random.getstate()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # since 3.12, Python warns if a process with threads forks
            pid = os.fork()
        if pid == 0:
            port = listener.getsockname()[1]
            # This rank's copies would keep the pipes of other ranks open.
            for inherited in (listener, parent_end, *(process.pipe for process in self.processes)):
                inherited.close()
            connected = Connected(rank, self.size, port, rank_end, note, folder, drawn)
            be_rank(body, connected)  # which never returns
        rank_end.close()
        with suppress(OSError):
            os.setpgid(pid, pid)  # the rank also does this; from now on it can be killed as a group
        self.processes.append(RankProcess(pid, parent_end, note, Ending(rank)))

    def _converse(self) -> None:
        """Receive messages until all ranks have ended or further waiting is useless."""
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

    def _take(self, process: RankProcess, kind: str, value: Any) -> None:
        if kind == "begun":
            process.begun = time.monotonic()
        elif kind == "raised":
            process.reports_until = time.monotonic() + REPORT_S
        elif kind == "doomed":
            process.ending.ordered = value
        elif kind == "may I debug?":
            process.is_debugged, self._may_debug = self._may_debug, False
            process.pipe.send(process.is_debugged)
        elif kind == "debugging":
            process.is_debugged = value
        elif kind == "ended":
            process.ending.outcome = value
            process.ending.when = time.monotonic() - self._start
            process.is_debugged = False

    def _check_death(self, process: RankProcess, patience: float = 0.0) -> None:
        if process.ending.code is not None:
            return
        deadline = time.monotonic() + patience
        while not (ended := os.waitpid(process.pid, os.WNOHANG))[0]:
            if time.monotonic() >= deadline:
                return
            time.sleep(0.005)
        with suppress(EOFError, OSError):  # its last messages
            while not process.is_over and process.pipe.poll():
                self._take(process, *process.pipe.recv())
        process.ending.code = os.waitstatus_to_exitcode(ended[1])
        process.ending.when = time.monotonic() - self._start
        process.is_debugged = False

    def _is_hopeless(self, now: float) -> bool:
        """Return whether to stop waiting."""
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
        """Return whether all ranks that have not ended are in collectives."""
        return all(process.is_over or process.note.read().get("inside") for process in self.processes)

    def _is_deadlocked(self, now: float) -> bool:
        """Return whether a rank is in a collective that another rank never joined before finishing."""
        for process in self.processes:
            call = process.note.read()
            if process.is_over or not call.get("inside") or call["call"] in ONE_TO_ONE:
                continue
            if now - call["since"] < STUCK_S:
                continue
            for peer in self.processes:
                outcome = peer.ending.outcome
                if outcome is None or peer.ending.rank not in call["ranks"]:
                    continue
                group_calls = outcome.calls.get(call["group"])
                if group_calls is None or (not group_calls.has_failed and len(group_calls.calls) < call["number"]):
                    self.deadlock = f"rank {peer.ending.rank} never joined a collective"
                    return True
        return False

    def _ask_for_stacks(self, folder: Path) -> None:
        """Ask the remaining ranks for their stacks, and also read the stacks of crashed ranks."""
        running = [process for process in self.processes if not process.is_over]
        ask_for_stacks(folder, {process.ending.rank: process.pid for process in running}, ANSWER_S)
        for process in self.processes:
            process.ending.stack = own_frames(stack_of(folder, process.ending.rank))
        for process in running:
            process.ending.doing = position(process.note.read(), process.ending.stack, process.begun is not None)
            process.ending.when = time.monotonic() - self._start


def kill(process: RankProcess) -> None:
    """Kill a rank and its child processes."""
    with suppress(OSError):
        os.killpg(process.pid, signal.SIGKILL)
    if process.ending.code is None:
        with suppress(OSError):  # the rank may have left its process group to use the terminal
            os.kill(process.pid, signal.SIGKILL)


def reap(process: RankProcess) -> None:
    """Wait until a killed rank has ended, and close its pipe."""
    if process.ending.code is None:
        with suppress(ChildProcessError):
            os.waitpid(process.pid, 0)
    process.pipe.close()


def check_fork() -> None:
    """Raise an error if forks of the test process cannot be ranks."""
    if dist.is_initialized():
        raise UsageError(
            "the test process itself is in a process group, which ranks would inherit; call "
            "torch.distributed.destroy_process_group() in the test or fixture that created it"
        )
    if torch.cuda.is_initialized():
        raise UsageError(TOO_LATE)


def ask_for_stacks(folder: Path, pids: Mapping[int, int], seconds: float) -> None:
    """Ask the ranks with these process ids for their stacks, and wait at most `seconds` until all are in `folder`."""
    for pid in pids.values() if stack_signal() else ():
        with suppress(OSError):
            os.kill(pid, stack_signal())
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and not all(stack_of(folder, rank) for rank in pids):
        time.sleep(0.01)
    if pids:
        time.sleep(0.05)  # wait until the stack is complete


def stack_of(folder: Path, rank: int) -> str:
    """Return the stack that a rank has written; an empty string if there is none."""
    try:
        return path_of(folder, rank).read_text(errors="replace").strip()
    except OSError:
        return ""
