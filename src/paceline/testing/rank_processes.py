"""Forks the ranks of a test from the test process, and communicates with them until all have finished.

    test process                             rank
    1. opens a port, pipes and notes
    2. forks                          ──▶    3. becomes a rank, runs the test's body
    4. waits, looks for deaths        ◀──       "begun", "killed", "debugging", "raised"
                                      ◀──    5. "ended", with the outcome
    6. kills it with its child processes

A rank that has finished waits for the others, because its exit would close connections that they still use.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import random
import re
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from paceline.core.messages import signal_name
from paceline.core.missing_ranks import named_ranks, ranks_by_value
from paceline.core.stacks import is_users
from paceline.errors import UsageError
from paceline.launch import stack_dump
from paceline.launch.child import die_with
from paceline.launch.job import group_environment, loopback_listener, loopback_store
from paceline.testing.recorded_collectives import ONE_TO_ONE, Calls, Note, unmatched

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
ENDED_BADLY = 70
"""Exit code of a rank whose body did not run to its end."""
FRAME = re.compile(r'File "(.+)", line (\d+) in (\S+)')
MACHINERY = ["/_pytest/", "/pluggy/", "/pytest/__main__", "/pytest_paceline.py", "<frozen runpy>"]
MACHINERY += [str(Path(__file__).parent)]
"""Parts of file paths. Frames of files whose path contains one of them are omitted from a stack."""
LEFT_OUT = ("skipped", "xfailed")
"""Kinds of outcomes, of ``pytest.skip`` and ``pytest.xfail``, that must be the same on all ranks."""


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
                self._wait_for_ranks()
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

    def _wait_for_ranks(self) -> None:
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
        elif kind == "killed":
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


@dataclass
class Connected:
    """A rank's number and its connection to the test process."""

    rank: int
    size: int
    port: int
    """Port of the store, on loopback."""
    pipe: Connection
    note: Note
    folder: Path
    """Folder for the rank's files, deleted by the test process."""
    drawn: Any
    """State of the ``random`` module in the test process."""

    def send(self, kind: str, value: Any = None) -> None:
        """Send a message to the test process."""
        self.pipe.send((kind, value))

    def request(self, kind: str) -> bool:
        """Send a question to the test process; return the answer."""
        self.send(kind)
        return bool(self.pipe.recv())


def be_rank(body: Callable[[Connected], Outcome], connected: Connected) -> NoReturn:
    """Run `body` in this newly forked process, and wait to be killed."""
    try:
        gc.freeze()  # a garbage collection would copy the memory of all objects of the test process
        os.setpgid(0, 0)  # so that the rank can be killed together with its child processes
        die_with(os.getppid())
        signal.set_wakeup_fd(-1)  # the descriptor belongs to an event loop of the test process
        random.setstate(connected.drawn)  # Python reseeds forks, but a fixture's seed should also apply to the ranks
        torch.set_num_threads(1)  # the fork lacks the test process's OpenMP threads, and would wait for them
        with stacks_on_request(connected.folder, connected.rank):
            connected.send("ended", body(connected))
            with suppress(EOFError, OSError):
                connected.pipe.recv()
    except BaseException:
        with suppress(BaseException):
            traceback.print_exc(file=sys.__stderr__)
    finally:
        # If this function returned, the rank would continue the pytest session.
        os._exit(ENDED_BADLY)


def environment(rank: int, size: int, port: int) -> dict[str, str]:
    """Return torchrun's environment variables for a rank on a single host, with the store at `port`."""
    settings = group_environment(rank, size, port)
    if sys.platform == "linux":
        # By default Gloo resolves the host's name, which may fail. Only on Linux is the loopback interface named lo.
        settings["GLOO_SOCKET_IFNAME"] = "lo"
    return settings


@contextmanager
def stacks_on_request(folder: Path, rank: int) -> Iterator[None]:
    """In the block, make this process write its stack into `folder` on a signal and when it crashes."""
    with stack_dump.path_of(folder, rank).open("w") as stack:
        faulthandler.enable(stack)
        if stack_dump.number():
            faulthandler.register(stack_dump.number(), stack, all_threads=False, chain=False)
        yield


def ask_for_stacks(folder: Path, pids: Mapping[int, int], seconds: float) -> None:
    """Ask the ranks with these process ids for their stacks, and wait at most `seconds` until all are in `folder`."""
    for pid in pids.values() if stack_dump.number() else ():
        with suppress(OSError):
            os.kill(pid, stack_dump.number())
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and not all(stack_of(folder, rank) for rank in pids):
        time.sleep(0.01)
    if pids:
        time.sleep(0.05)  # wait until the stack is complete


def stack_of(folder: Path, rank: int) -> str:
    """Return the stack that a rank has written; an empty string if there is none."""
    try:
        return stack_dump.path_of(folder, rank).read_text(errors="replace").strip()
    except OSError:
        return ""


def own_frames(stack: str) -> str:
    """Return a stack without frames of pytest and of this package."""
    return "\n".join(line for line in stack.splitlines() if not any(part in line for part in MACHINERY))


def position(note: Mapping[str, Any], stack: str, has_begun: bool) -> str:
    """Describe a rank's position in one line, based on its latest recorded call and its Python stack."""
    if note.get("inside"):
        number = f", its collective {note['number']}" if note["call"] not in ONE_TO_ONE else ""
        return f"is in {note['call']}{number}, called at {note['place']}"
    for path, line, function in FRAME.findall(stack):
        if is_users(path):
            return f"is at {path.rpartition('/')[2]}:{line} in {function}"
    if not stack:
        return "does not answer" if has_begun else "has not joined the world"
    return "is in a library" if has_begun else "has not joined the world"


@dataclass
class Outcome:
    """The outcome of the test on a rank, as reported by the rank."""

    kind: str
    """``passed``, ``failed``, ``skipped``, ``xfailed`` or ``exit``."""
    message: str = ""
    """Message of the exception, in one line."""
    report: Any = None
    """pytest's report of the exception, or text."""
    error: bytes | None = None
    """Pickled exception, if it can be pickled."""
    is_consequence: bool = False
    """Whether the exception is about a failed collective, possibly as a consequence of another rank's failure."""
    returncode: int | None = None
    """Exit code given to ``pytest.exit``."""
    sections: list[tuple[str, str]] = field(default_factory=list)
    """Captured output: the kind, such as ``stdout``, and the text."""
    warnings: list[tuple[str, bytes, str, int]] = field(default_factory=list)
    """Warnings: text, pickled category, file and line."""
    properties: list[tuple[str, object]] = field(default_factory=list)
    """Properties recorded with ``record_property``."""
    calls: Calls = field(default_factory=dict)


@dataclass
class Ending:
    """How a rank ended, as seen by the test process."""

    rank: int
    outcome: Outcome | None = None
    """The rank's report; None if it did not finish."""
    code: int | None = None
    """Exit code (negative for a signal) of a rank that died without being killed by the test process."""
    ordered: str = ""
    """Description of the fault that the test used to end the rank; empty if there was none."""
    doing: str = ""
    """One line about the rank's position when waiting ended."""
    stack: str = ""
    when: float = 0.0
    """When the rank ended, in seconds after the start."""


@dataclass
class Verdict:
    """The test's result."""

    kind: str
    """``passed``, or one of the kinds of :class:`Outcome`."""
    first: Ending | None = None
    """Ending of the rank that failed first, if that rank reported an exception."""
    message: str = ""
    """One-line message that names the rank."""


def judge(endings: Sequence[Ending], timeout: float, deadlock: str = "") -> Verdict:
    """Return the test's outcome, given how ranks 0, 1, … ended. `deadlock` describes a deadlock that ended the wait."""
    outcomes = {ending.rank: ending.outcome for ending in endings if ending.outcome is not None}
    if leaving := [e for e in endings if e.outcome and e.outcome.kind == "exit"]:
        return Verdict("exit", leaving[0], outcomes[leaving[0].rank].message)
    dead = [e for e in endings if e.code is not None and not e.ordered]
    failed = [e for e in endings if e.outcome and e.outcome.kind == "failed"]
    own_failures = [e for e in failed if not outcomes[e.rank].is_consequence]
    disagreement = _disagreement(endings)
    # A failed collective is a consequence of another rank's error or death, so look for these causes first.
    for causes in (own_failures + dead, [] if disagreement else failed):
        if causes:
            first = min(causes, key=lambda e: e.when)
            if first.outcome is None:
                return Verdict("failed", None, f"{_died(first)} before the end of the test")
            return Verdict("failed", first, f"rank {first.rank}: {first.outcome.message}")
    if disagreement:
        return Verdict("failed", None, disagreement)
    silent = [e for e in endings if e.outcome is None and not e.ordered]
    if silent:
        where = "; ".join(f"rank {e.rank} {e.doing}" for e in silent)
        others = f"; {named_ranks(list(outcomes))} had finished" if outcomes else ""
        return Verdict("failed", None, f"{deadlock or f'no end within {timeout:g} s'}: {where}{others}")
    for ending in endings:
        if ending.outcome is not None and ending.outcome.kind in LEFT_OUT:
            return Verdict(ending.outcome.kind, ending, ending.outcome.message)
    if len(outcomes) == len(endings) and (difference := unmatched(_calls(outcomes))):
        return Verdict("failed", None, f"the test left a collective unmatched: {difference}")
    return Verdict("passed")


def _disagreement(endings: Sequence[Ending]) -> str:
    """Return a line that says which ranks skipped the test, if others did not; otherwise an empty string.

    Ranks that skip may make the other ranks wait or fail.
    """
    kinds = [(e.rank, e.outcome.kind if e.outcome is not None else "silent") for e in endings if not e.ordered]
    by_kind = ranks_by_value(kinds)
    left_out = {kind: ranks for kind, ranks in by_kind.items() if kind in LEFT_OUT}
    if not left_out or len(by_kind) == 1:
        return ""
    reasons = {e.rank: e.outcome.message for e in endings if e.outcome is not None}
    parts = [f"{named_ranks(ranks)} {kind} ({reasons[ranks[0]]})" for kind, ranks in left_out.items()]
    rest = [rank for rank, kind in kinds if kind not in LEFT_OUT]
    return (
        f"{', '.join(parts)}{f', and {named_ranks(rest)} did not' if rest else ''}; use a skip condition "
        "that is the same on all ranks, and return early on ranks without work"
    )


def others(endings: Sequence[Ending], first: Ending | None) -> list[tuple[str, str]]:
    """Return a title and a text for each rank other than `first`."""
    return [_other(ending, first) for ending in endings if ending is not first]


def _other(ending: Ending, first: Ending | None) -> tuple[str, str]:
    if ending.ordered:
        return f"the test ended rank {ending.rank}: {ending.ordered}", ""
    if ending.code is not None:
        return _died(ending), ending.stack
    if ending.outcome is None:
        return f"rank {ending.rank} {ending.doing}", ending.stack
    outcome = ending.outcome
    if outcome.kind == "failed":
        same = first is not None and first.outcome is not None and str(outcome.report) == str(first.outcome.report)
        if same:
            return f"rank {ending.rank} raised the same", ""
        return f"rank {ending.rank} also raised: {outcome.message}", str(outcome.report)
    return f"rank {ending.rank} {outcome.kind} after {ending.when:.2f} s", ""


def _died(ending: Ending) -> str:
    assert ending.code is not None
    if ending.code < 0:
        return f"rank {ending.rank} was killed by {signal_name(-ending.code)}"
    return f"rank {ending.rank} ended with exit code {ending.code}"


def _calls(outcomes: Mapping[int, Outcome]) -> dict[int, Calls]:
    return {rank: outcome.calls for rank, outcome in outcomes.items() if outcome.kind != "skipped"}
