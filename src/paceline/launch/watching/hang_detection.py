"""Finds ranks that make no progress: those that the others wait for, and those that were stopped.

Progress is any change in a rank's black box. A rank that waits for others says so there, or its stack does: it is in
the code of a collective, and its main thread has slept all the time. The ranks that hang are those that do not wait.
Once a rank has been still for the timeout, all are asked for their stacks, and again every half of it.

A rank in the first step of a start may compile, one that saves may have much to write, and ranks in the script's own
code that no other rank waits for may run an evaluation. They have :data:`PATIENCE` times as long.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from paceline.core.telemetry.flight_record import WAITING, Snapshot, path_of, process_state, read_box
from paceline.launch.failures.rank_state import doings, state_of
from paceline.launch.failures.root_cause import End, missed, quoted
from paceline.launch.watching import stack_requests

PATIENCE = 10
"""Factor of the timeout for phases that may be long."""
BETWEEN_S = 0.2
"""Interval between two checks, in seconds."""
TO_ANSWER = 4
"""Most times that a sleeping thread is run to write its stacks."""
LONGEST_S = 1.0
"""Longest time counted between two checks: if the launcher was stopped together with its ranks, that is not a hang."""


@dataclass(frozen=True)
class Sight:
    """State of a rank at one check."""

    rank: int
    box: Snapshot | None
    process: str
    """The state of its process, a letter of /proc; empty if that is not known."""
    still: float
    """Seconds for which its box has not changed."""
    stopped: float
    """Seconds for which its process was stopped."""
    asleep: float = 0.0
    """Seconds for which its main thread has not run."""
    told: str = ""
    """Its stacks; empty if it has not told them."""
    moves: bool = False
    """Whether they have changed since its box did."""

    @property
    def waited(self) -> float | None:
        """Seconds for which it has waited for other ranks; None if it does not wait for them."""
        if self.process == "T":
            return None
        if self.box is not None and self.box.phase in WAITING:
            return None if stack_requests.is_in_script(self.told) else self.still
        call = stack_requests.waiting_call(self.told)
        # Our wrapper would say so if it waited in backward, and torch's does not.
        is_ours = call == stack_requests.BACKWARD and self.box is not None and self.box.phase == "backward"
        return min(self.still, self.asleep) if call and not is_ours else None

    def is_still(self, timeout: float, is_missed: bool) -> bool:
        """Return whether it has made no progress for too long; `is_missed` says that others wait for it."""
        return self.still >= (PATIENCE if self._may_be_long(is_missed) else 1) * timeout

    def _may_be_long(self, is_missed: bool) -> bool:
        if self.box is None or not self.box.has_stepped:
            return True
        if self.waited is not None:
            return False
        if self.box.phase == "loop":
            return not is_missed or stack_requests.waits_for_save(self.told)
        return self.box.phase == "checkpoint" and not stack_requests.is_in_script(self.told)

    def hangs(self, timeout: float, is_missed: bool) -> bool:
        """Return whether it hangs on its own: it does not wait for others and shows no sign of life."""
        if self.waited is not None or not self.is_still(timeout, is_missed):
            return False
        return is_missed or not (self.box is None or (self.box.phase == "loop" and self.moves))


@dataclass(frozen=True)
class Hang:
    """Ranks that make no progress, and the known facts about all ranks."""

    ranks: tuple[int, ...]
    """The ranks that the others wait for; all of them if each waits for another."""
    details: Mapping[int, str]
    """How each of these hangs."""
    stacks: Mapping[int, str] = field(default_factory=dict)
    """Stacks of the ranks that answered."""

    def lines(self, sights: Sequence[Sight]) -> list[str]:
        """Return the message for the user: the ranks, their stacks, and the calls in which the others wait."""
        lines = []
        for rank in self.ranks:
            lines += quoted(rank, self.stacks.get(rank, ""))
        now = time.monotonic()
        others = {each.rank: each for each in sights if each.rank not in self.ranks}
        lines += doings(
            (rank, state_of(each.box, now, raised=False).doing + self._call(rank))
            for rank, each in others.items()
            if each.box is not None
        )
        return [*lines, *(f"rank {rank} hangs: {self.details[rank]}" for rank in self.ranks)]

    def _call(self, rank: int) -> str:
        call = stack_requests.waiting_call(self.stacks.get(rank, ""))
        return f", in {call}()" if call else ""


def hanging(sights: Sequence[Sight], timeout: float) -> tuple[int, ...]:
    """Return the ranks that hang: stopped ones, else those that others wait for, else all if all are still."""
    if stopped := tuple(each.rank for each in sights if each.stopped >= timeout):
        return stopped
    waited = [each.waited for each in sights]
    is_missed = any(seconds is not None and seconds >= timeout for seconds in waited)
    if still := tuple(each.rank for each in sights if each.hangs(timeout, is_missed)):
        return still
    if is_missed and all(seconds is not None and seconds >= timeout for seconds in waited):
        return tuple(each.rank for each in sights)
    return ()


class HangWatch:
    """Watches the ranks of the present start.

    Args:
        folder: the job's; None if it has none, then nothing is noticed.
        timeout: seconds without progress; None to watch nothing.
    """

    def __init__(self, folder: Path | None, timeout: float | None) -> None:
        self._folder, self._timeout = folder, timeout
        self.begin()

    def begin(self) -> None:
        """Forget the ranks of the previous start."""
        self._stacks: dict[int, str] = {}
        """Stacks that ranks have sent."""
        self._due = 0.0
        """When the ranks are asked for them again, if one is still."""
        self._before: dict[int, list[str]] = {}
        """The stacks of their main threads when they were last asked, while one has been still."""
        self._moved: set[int] = set()
        """Ranks whose stacks have changed since their boxes did."""
        self._looked = 0.0
        """When the ranks were last looked at."""
        self._still: dict[int, tuple[Snapshot | None, float]] = {}
        """The box of each rank, and the seconds since it last changed."""
        self._stopped: dict[int, float] = {}
        """For how long each rank's process has been stopped."""
        self._asleep: dict[int, tuple[int, float]] = {}
        """How often each rank's main thread may have run, and for how long it has not run more often."""
        self._killed: dict[int, str] = {}
        """How the ranks hung that were killed for it."""

    def check(self, processes: Mapping[int, int], say: Callable[[str], None]) -> None:
        """Look for a hang; tell the user, and kill the ranks that hang.

        Args:
            processes: the processes of the running ranks, by rank.
            say: tells the user.
        """
        now = time.monotonic()
        if self._timeout is None or self._folder is None or now - self._looked < BETWEEN_S:
            return
        if self._killed:  # the others save their last step, and are ended soon
            return
        passed = min(now - self._looked, LONGEST_S) if self._looked else 0.0
        self._looked = now
        sights = [self._see(rank, pid, passed) for rank, pid in processes.items()]
        if not any(max(each.still, each.stopped) >= self._timeout for each in sights):
            self._due = 0.0
            self._before.clear()
            return
        if now < self._due:
            return
        sights = self._request_stacks(sights, processes)
        self._due = time.monotonic() + self._timeout / 2
        ranks = hanging(sights, self._timeout)
        if not ranks:
            return
        told = {each.rank: each.told for each in sights if each.told}
        by_rank = {each.rank: each for each in sights}
        stopped = [rank for rank in ranks if by_rank[rank].stopped]
        if stopped:
            told |= _stacks_of_stopped(self._folder, stopped, processes)
            self._stacks |= told
        hang = Hang(ranks, {rank: _detail(by_rank[rank], told.get(rank, "")) for rank in ranks}, told)
        say("\n".join(hang.lines(sights)))
        self._kill(hang, processes)

    def pause(self, seconds: float) -> float:
        """Return how long to wait until the next check, at most `seconds`."""
        return seconds if self._timeout is None else min(seconds, BETWEEN_S)

    def request_absent(self, ends: Sequence[End], processes: Mapping[int, int]) -> None:
        """Ask the ranks for their stacks that kept the others waiting, and are about to be ended for that."""
        absent = {end.rank: processes[end.rank] for end in missed(ends) if end.rank in processes}
        if self._folder is not None:
            self._stacks |= stack_requests.request_stacks(self._folder, absent, resume=True)

    def with_hangs(self, ends: Sequence[End]) -> list[End]:
        """Return `ends` with the hangs that were found, and all reported stacks."""
        return [
            replace(end, hang=self._killed.get(end.rank, ""), stacks=self._stacks.get(end.rank, "")) for end in ends
        ]

    def _kill(self, hang: Hang, processes: Mapping[int, int]) -> None:
        """Kill the ranks that the others wait for; if all wait, only the last one, because the others notice that."""
        victims = hang.ranks if len(hang.ranks) < len(processes) else hang.ranks[-1:]
        for rank in victims:
            self._killed[rank] = hang.details[rank]
            _send([processes[rank]], signal.SIGKILL)

    def _see(self, rank: int, pid: int, passed: float) -> Sight:
        assert self._folder is not None
        try:
            box = read_box(path_of(self._folder, rank))
        except (OSError, ValueError):
            box = None
        before, still = self._still.get(rank, (None, 0.0))
        still = still + passed if box == before else 0.0
        self._still[rank] = box, still
        process, runs = process_state(pid), stack_requests.runs_of(pid)
        self._stopped[rank] = self._stopped.get(rank, 0.0) + passed if process == "T" else 0.0
        allowed, asleep = self._asleep.get(rank, (runs, 0.0))
        self._asleep[rank] = (allowed, asleep + passed) if runs <= allowed else (runs, 0.0)
        return Sight(rank, box, process, still, self._stopped[rank], self._asleep[rank][1])

    def _request_stacks(self, sights: Sequence[Sight], processes: Mapping[int, int]) -> list[Sight]:
        """Return `sights` with the stacks of those that are not stopped."""
        assert self._folder is not None
        assert self._timeout is not None
        told = stack_requests.request_stacks(
            self._folder, {each.rank: processes[each.rank] for each in sights if not each.stopped}
        )
        for each in sights:
            allowed, asleep = self._asleep[each.rank]
            self._asleep[each.rank] = allowed + TO_ANSWER, asleep
            before, now = self._before.get(each.rank), stack_requests.main_thread(told.get(each.rank, ""))
            if each.still < self._timeout:
                self._moved.discard(each.rank)
            elif before and before != now:
                self._moved.add(each.rank)
            self._before[each.rank] = now
        self._stacks |= told
        return [replace(each, told=told.get(each.rank, ""), moves=each.rank in self._moved) for each in sights]


def _stacks_of_stopped(folder: Path, stopped: Sequence[int], processes: Mapping[int, int]) -> dict[int, str]:
    """Return the stacks of the `stopped` ranks, which are continued for that, while the others are held.

    On its own no rank ends a step, so it changes nothing that others see before it is killed.
    """
    others = [pid for rank, pid in processes.items() if rank not in stopped]
    try:
        _send(others, signal.SIGSTOP)
        return stack_requests.request_stacks(folder, {rank: processes[rank] for rank in stopped}, resume=True)
    finally:
        _send([processes[rank] for rank in stopped], signal.SIGSTOP)
        _send(others, signal.SIGCONT)


def _send(processes: Sequence[int], number: signal.Signals) -> None:
    for pid in processes:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def _detail(sight: Sight, told: str) -> str:
    if sight.stopped:
        how = f"stopped for {sight.stopped:.0f} s, by SIGSTOP or by a terminal"
    else:
        how = f"no progress for {sight.still:.0f} s"
        if sight.process == "D":
            how += ", in a system call that cannot be interrupted, as a disk or a driver has them"
    if sight.box is not None:
        state = state_of(sight.box, time.monotonic(), raised=False)
        how += f", {state.moment.partition(', for ')[0]}"
    return how + ("" if told else "; it has not told its stacks")
