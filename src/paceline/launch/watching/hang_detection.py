"""Detection of ranks that make no progress while other ranks wait for them, or that were stopped.

Progress is any change in a rank's black box. The box or the stack shows whether a rank waits for others: then it is in
the code of a collective, and its main thread has slept all the time. Ranks that do not wait are the ones that hang.
When a rank has made no progress for the timeout, all ranks are asked for their stacks, again after half the timeout.

Some ranks have :data:`PATIENCE` times as long: in the first step of a start, which may compile; during a save; and in
the script's own code while no other rank waits, which may be an evaluation.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from paceline.core.telemetry.flight_record import WAITING, Snapshot, path_of, process_state, read_box
from paceline.launch.failures.rank_state import doings, state_of
from paceline.launch.failures.root_cause import End, missed, quoted
from paceline.launch.watching import stack_requests

PATIENCE = 10
"""Multiple of the timeout for phases that may be long."""
BETWEEN_S = 0.2
"""Interval between two checks, in seconds."""
TO_ANSWER = 4
"""Maximum number of times that a sleeping thread runs to write its stacks."""
LONGEST_S = 1.0
"""Maximum time counted between two checks. Ranks that were stopped together with the launcher do not hang."""


@dataclass(frozen=True)
class Sight:
    """A rank as seen by one check."""

    rank: int
    box: Snapshot | None
    process: str
    """State of its process, a letter of /proc; empty if unknown."""
    still: float
    """Seconds since its box changed."""
    stopped: float
    """Seconds since its process was stopped."""
    asleep: float = 0.0
    """Seconds since its main thread ran."""
    stacks: str = ""
    """Its stacks; empty if it did not report them."""
    moves: bool = False
    """Whether its stacks have changed since its box did."""

    @property
    def waited(self) -> float | None:
        """Seconds since it began to wait for other ranks; None if it does not wait."""
        if self.process == "T":
            return None
        if self.box is not None and self.box.phase in WAITING:
            return None if stack_requests.is_in_script(self.stacks) else self.still
        call = stack_requests.waiting_call(self.stacks)
        # The box of Paceline's wrapper shows waits in backward. torch's wrapper has no box.
        is_ours = call == stack_requests.BACKWARD and self.box is not None and self.box.phase == "backward"
        return min(self.still, self.asleep) if call and not is_ours else None

    def is_still(self, timeout: float, is_missed: bool) -> bool:
        """Return whether it has made no progress for too long; `is_missed` if other ranks wait for it."""
        return self.still >= (PATIENCE if self._may_be_long(is_missed) else 1) * timeout

    def _may_be_long(self, is_missed: bool) -> bool:
        if self.box is None or not self.box.has_stepped:
            return True
        if self.waited is not None:
            return False
        if self.box.phase == "loop":
            return not is_missed or stack_requests.waits_for_save(self.stacks)
        return self.box.phase == "checkpoint" and not stack_requests.is_in_script(self.stacks)

    def hangs(self, timeout: float, is_missed: bool) -> bool:
        """Return whether it hangs: it makes no progress, and not because it waits for other ranks."""
        if self.waited is not None or not self.is_still(timeout, is_missed):
            return False
        return is_missed or not (self.box is None or (self.box.phase == "loop" and self.moves))


def hanging(sights: Sequence[Sight], timeout: float) -> tuple[int, ...]:
    """Return the ranks that hang: stopped ranks, or ranks that others wait for, or all ranks if each waits."""
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
    """Watches the ranks of the current start.

    Args:
        folder: the job's folder; without one hangs are not detected.
        timeout: seconds without progress after which a rank hangs; None to disable the watch.
    """

    def __init__(self, folder: Path | None, timeout: float | None) -> None:
        self._folder, self._timeout = folder, timeout
        self.begin()

    def begin(self) -> None:
        """Forget the ranks of the previous start."""
        self._stacks: dict[int, str] = {}
        """Latest stacks of each rank."""
        self._due = 0.0
        """Time of the next request for stacks, if a rank makes no progress."""
        self._previous_stacks: dict[int, list[str]] = {}
        """Main thread's stack of each rank at the latest request."""
        self._moved: set[int] = set()
        """Ranks whose stacks have changed since their boxes did."""
        self._looked = 0.0
        """Time of the latest check."""
        self._still: dict[int, tuple[Snapshot | None, float]] = {}
        """Box of each rank, and seconds since it changed."""
        self._stopped: dict[int, float] = {}
        """Seconds since each rank's process was stopped."""
        self._asleep: dict[int, tuple[int, float]] = {}
        """Number of times that each rank's main thread may have run, and seconds since it exceeded that number."""
        self._killed: dict[int, str] = {}
        """Descriptions of the hangs of ranks that were killed."""

    def check(self, processes: Mapping[int, int], say: Callable[[str], None]) -> None:
        """Look for a hang; report and kill the ranks that hang.

        Args:
            processes: process ids of the running ranks.
            say: prints a message.
        """
        now = time.monotonic()
        if self._timeout is None or self._folder is None or now - self._looked < BETWEEN_S:
            return
        if self._killed:  # the other ranks save their last step and end soon
            return
        passed = min(now - self._looked, LONGEST_S) if self._looked else 0.0
        self._looked = now
        sights = [self._see(rank, pid, passed) for rank, pid in processes.items()]
        if not any(max(each.still, each.stopped) >= self._timeout for each in sights):
            self._due = 0.0
            self._previous_stacks.clear()
            return
        if now < self._due:
            return
        sights = self._request_stacks(sights, processes)
        self._due = time.monotonic() + self._timeout / 2
        ranks = hanging(sights, self._timeout)
        if not ranks:
            return
        by_rank = {sight.rank: sight for sight in sights}
        if stopped := [rank for rank in ranks if by_rank[rank].stopped]:
            stacks = _stacks_of_stopped(self._folder, stopped, processes)
            by_rank |= {rank: replace(by_rank[rank], stacks=text) for rank, text in stacks.items()}
            self._stacks |= stacks
        hung = [by_rank.pop(rank) for rank in ranks]
        details = {sight.rank: _detail(sight) for sight in hung}
        lines = [line for sight in hung for line in quoted(sight.rank, sight.stacks)]
        lines += doings((rank, _doing(sight)) for rank, sight in by_rank.items() if sight.box is not None)
        say("\n".join([*lines, *(f"rank {rank} hangs: {detail}" for rank, detail in details.items())]))
        # If all ranks wait for each other, one is killed, and the others notice.
        for rank in ranks if len(ranks) < len(processes) else ranks[-1:]:
            self._killed[rank] = details[rank]
            _send([processes[rank]], signal.SIGKILL)

    def pause(self, seconds: float) -> float:
        """Return the seconds until the next check, at most `seconds`."""
        return seconds if self._timeout is None else min(seconds, BETWEEN_S)

    def request_absent(self, ends: Sequence[End], processes: Mapping[int, int]) -> None:
        """Ask ranks that kept the others waiting for their stacks, before they are ended."""
        absent = {end.rank: processes[end.rank] for end in missed(ends) if end.rank in processes}
        if self._folder is not None:
            self._stacks |= stack_requests.request_stacks(self._folder, absent, resume=True)

    def with_hangs(self, ends: Sequence[End]) -> list[End]:
        """Return `ends` with the hangs and stacks of the ranks."""
        return [
            replace(end, hang=self._killed.get(end.rank, ""), stacks=self._stacks.get(end.rank, "")) for end in ends
        ]

    def _see(self, rank: int, pid: int, passed: float) -> Sight:
        assert self._folder is not None
        try:
            box = read_box(path_of(self._folder, rank))
        except (OSError, ValueError):
            box = None
        previous, still = self._still.get(rank, (None, 0.0))
        still = still + passed if box == previous else 0.0
        self._still[rank] = box, still
        process, runs = process_state(pid), stack_requests.runs_of(pid)
        self._stopped[rank] = self._stopped.get(rank, 0.0) + passed if process == "T" else 0.0
        allowed, asleep = self._asleep.get(rank, (runs, 0.0))
        self._asleep[rank] = (allowed, asleep + passed) if runs <= allowed else (runs, 0.0)
        return Sight(rank, box, process, still, self._stopped[rank], self._asleep[rank][1])

    def _request_stacks(self, sights: Sequence[Sight], processes: Mapping[int, int]) -> list[Sight]:
        """Return `sights` with the stacks of ranks that are not stopped."""
        assert self._folder is not None
        assert self._timeout is not None
        running = {sight.rank: processes[sight.rank] for sight in sights if not sight.stopped}
        stacks = stack_requests.request_stacks(self._folder, running)
        for sight in sights:
            rank = sight.rank
            allowed, asleep = self._asleep[rank]
            self._asleep[rank] = allowed + TO_ANSWER, asleep
            previous, frames = self._previous_stacks.get(rank), stack_requests.main_thread(stacks.get(rank, ""))
            if sight.still < self._timeout:
                self._moved.discard(rank)
            elif previous and previous != frames:
                self._moved.add(rank)
            self._previous_stacks[rank] = frames
        self._stacks |= stacks
        return [replace(sight, stacks=stacks.get(sight.rank, ""), moves=sight.rank in self._moved) for sight in sights]


def _stacks_of_stopped(folder: Path, stopped: Sequence[int], processes: Mapping[int, int]) -> dict[int, str]:
    """Continue the `stopped` ranks for a moment to get their stacks, while the other ranks are stopped.

    A rank cannot complete a step alone, so it changes nothing for the others before it is killed.
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


def _doing(sight: Sight) -> str:
    """Describe the activity of a rank that does not hang."""
    call = stack_requests.waiting_call(sight.stacks)
    return state_of(sight.box, time.monotonic(), raised=False).doing + (f", in {call}()" if call else "")


def _detail(sight: Sight) -> str:
    """Describe how a rank hangs."""
    if sight.stopped:
        how = f"stopped for {sight.stopped:.0f} s, by SIGSTOP or by a terminal"
    else:
        how = f"no progress for {sight.still:.0f} s"
        if sight.process == "D":
            how += ", in a system call of a disk or driver that cannot be interrupted"
    if sight.box is not None:
        state = state_of(sight.box, time.monotonic(), raised=False)
        how += f", {state.moment.partition(', for ')[0]}"
    return how + ("" if sight.stacks else "; it did not report its stacks")
