"""Detects ranks that make no progress while other ranks wait for them, and ranks that were stopped.

Progress is any change in a rank's black box. A rank waits for others if it is inside a collective, according to its box
or stack, and its main thread has been asleep the whole time. A rank that neither makes progress nor waits counts as
hanging. When a rank has made no progress for the length of the timeout, the launcher requests the stacks of all ranks,
and repeats the request every half timeout.

The timeout is :data:`PATIENCE` times as long in the first step of a start, which may compile; during a save; and in the
script's own code while no other rank waits, because that may be an evaluation.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from paceline.core.process_status import context_switches, process_state
from paceline.core.telemetry.black_box import WAITING, Snapshot, snapshot_of
from paceline.launch.failures.rank_state import doings, state_of
from paceline.launch.failures.root_cause import End, missed, quoted
from paceline.launch.watching import stack_requests

PATIENCE = 10
"""Multiplier of the timeout for phases that may take long."""
BETWEEN_S = 0.2
"""Interval between two checks, in seconds."""
TO_ANSWER = 4
"""Maximum number of times that a sleeping thread has to run in order to write its stacks."""
LONGEST_S = 1.0
"""Maximum time between two checks that counts, in seconds. Ranks that were stopped together with the launcher do not
hang."""


@dataclass
class Sight:
    """The launcher's view of a rank during one start."""

    rank: int
    box: Snapshot | None = None
    process: str = ""
    """State of its process, a letter from /proc; empty if unknown."""
    still: float = 0.0
    """Seconds since its box last changed."""
    stopped: float = 0.0
    """Seconds since its process was stopped."""
    asleep: float = 0.0
    """Seconds since its main thread last ran."""
    stacks: str = ""
    """Its stacks at the latest request; empty if it did not report them."""
    moves: bool = False
    """Whether its stacks have changed since its box last changed."""
    frames: Sequence[str] = ()
    """Its main thread's stack at the latest request; empty if the ranks have made progress since then."""
    allowed_runs: int = -1
    """The main thread counts as asleep if it has run at most this many times."""

    def look(self, box: Snapshot | None, pid: int, passed: float) -> None:
        """Update this view from the rank's box and process, `passed` seconds after the last check."""
        self.still = self.still + passed if box == self.box else 0.0
        self.box, self.process = box, process_state(pid)
        self.stopped = self.stopped + passed if self.process == "T" else 0.0
        runs = context_switches(pid)
        self.asleep = self.asleep + passed if runs <= self.allowed_runs else 0.0
        self.allowed_runs = max(runs, self.allowed_runs)

    def note_stacks(self, stacks: str, timeout: float) -> None:
        """Store the answer to a request for stacks."""
        self.allowed_runs += TO_ANSWER
        previous, self.frames = self.frames, stack_requests.main_thread(stacks)
        if self.still < timeout:
            self.moves = False
        elif previous and previous != self.frames:
            self.moves = True
        self.stacks = stacks

    @property
    def waited(self) -> float | None:
        """Seconds since the rank began to wait for other ranks; None if it does not wait."""
        if self.process == "T":
            return None
        if self.box is not None and self.box.phase in WAITING:
            return None if stack_requests.is_in_script(self.stacks) else self.still
        call = stack_requests.waiting_call(self.stacks)
        # Paceline's wrapper records waits during backward in the box; torch's wrapper does not.
        is_ours = call == stack_requests.BACKWARD and self.box is not None and self.box.phase == "backward"
        return min(self.still, self.asleep) if call and not is_ours else None

    def is_still(self, timeout: float, is_missed: bool) -> bool:
        """Return whether the rank has made no progress for too long; `is_missed` if other ranks wait for it."""
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
        """Return whether the rank hangs, that is, makes no progress although it does not wait for other ranks."""
        if self.waited is not None or not self.is_still(timeout, is_missed):
            return False
        return is_missed or not (self.box is None or (self.box.phase == "loop" and self.moves))


def hanging(sights: Sequence[Sight], timeout: float) -> tuple[int, ...]:
    """Return the ranks that hang: stopped ranks; else ranks that others wait for; else all ranks, if all of them do."""
    if stopped := tuple(sight.rank for sight in sights if sight.stopped >= timeout):
        return stopped
    waited = [sight.waited for sight in sights]
    is_missed = any(seconds is not None and seconds >= timeout for seconds in waited)
    if still := tuple(sight.rank for sight in sights if sight.hangs(timeout, is_missed)):
        return still
    if is_missed and all(seconds is not None and seconds >= timeout for seconds in waited):
        return tuple(sight.rank for sight in sights)
    return ()


class HangWatch:
    """Watches the ranks of one start.

    Args:
        folder: the job's folder.
        timeout: seconds that a rank may go without progress before it counts as hanging; None disables the watch.
    """

    def __init__(self, folder: Path, timeout: float | None) -> None:
        self._folder, self._timeout = folder, timeout
        self._sights: dict[int, Sight] = {}
        self._stacks: dict[int, str] = {}
        """Latest stacks that each rank has reported."""
        self._due = 0.0
        """Time of the next request for stacks, if a rank makes no progress."""
        self._looked = 0.0
        """Time of the latest check."""
        self._killed: dict[int, str] = {}
        """Description of the hang for each rank that was killed."""

    def check(self, processes: Mapping[int, int], say: Callable[[str], None]) -> None:
        """Look for a hang; report and kill the ranks that hang.

        Args:
            processes: process ids of the running ranks.
            say: prints a message.
        """
        now = time.monotonic()
        if self._timeout is None or now - self._looked < BETWEEN_S:
            return
        if self._killed:  # the other ranks will soon save their last step and exit
            return
        passed = min(now - self._looked, LONGEST_S) if self._looked else 0.0
        self._looked = now
        sights = [self._sights.setdefault(rank, Sight(rank)) for rank in processes]
        for sight in sights:
            sight.look(snapshot_of(self._folder, sight.rank), processes[sight.rank], passed)
        if not any(max(sight.still, sight.stopped) >= self._timeout for sight in sights):
            self._due = 0.0
            for sight in sights:
                sight.frames = ()
            return
        if now < self._due:
            return
        stacks = stack_requests.request_stacks(
            self._folder, {sight.rank: processes[sight.rank] for sight in sights if not sight.stopped}
        )
        self._stacks |= stacks
        for sight in sights:
            sight.note_stacks(stacks.get(sight.rank, ""), self._timeout)
        self._due = time.monotonic() + self._timeout / 2
        ranks = hanging(sights, self._timeout)
        if not ranks:
            return
        by_rank = {sight.rank: sight for sight in sights}
        hung = [by_rank.pop(rank) for rank in ranks]
        self._stacks |= {sight.rank: "" for sight in hung if sight.stopped}  # older stacks belong to another moment
        details = {sight.rank: _detail(sight) for sight in hung}
        lines = [line for sight in hung for line in quoted(sight.rank, sight.stacks)]
        lines += doings((rank, _doing(sight)) for rank, sight in by_rank.items() if sight.box is not None)
        say("\n".join([*lines, *(f"rank {rank} hangs: {detail}" for rank, detail in details.items())]))
        # If all ranks wait for each other, kill only one, so that the others notice.
        for rank in ranks if len(ranks) < len(processes) else ranks[-1:]:
            self._killed[rank] = details[rank]
            with suppress(ProcessLookupError):
                os.kill(processes[rank], signal.SIGKILL)

    def pause(self, seconds: float) -> float:
        """Return the seconds until the next check, at most `seconds`."""
        return seconds if self._timeout is None else min(seconds, BETWEEN_S)

    def request_absent(self, ends: Sequence[End], processes: Mapping[int, int]) -> None:
        """Request the stacks of ranks that kept the others waiting, before the launcher terminates them."""
        absent = {end.rank: processes[end.rank] for end in missed(ends) if end.rank in processes}
        self._stacks |= stack_requests.request_stacks(self._folder, absent, resume=True)

    def with_hangs(self, ends: Sequence[End]) -> list[End]:
        """Return `ends` with the ranks' hangs and stacks added."""
        return [
            replace(end, hang=self._killed.get(end.rank, ""), stacks=self._stacks.get(end.rank, "")) for end in ends
        ]


def _doing(sight: Sight) -> str:
    """Describe what a rank that does not hang is doing."""
    call = stack_requests.waiting_call(sight.stacks)
    return state_of(sight.box, time.monotonic(), raised=False).doing + (f", in {call}()" if call else "")


def _detail(sight: Sight) -> str:
    """Describe how a rank hangs."""
    how = f"no progress for {sight.still:.0f} s"
    if sight.stopped:
        how = f"stopped for {sight.stopped:.0f} s, by SIGSTOP or by a terminal"
    elif sight.process == "D":
        how += ", in a system call of a disk or driver that cannot be interrupted"
    if sight.box is not None:
        state = state_of(sight.box, time.monotonic(), raised=False)
        how += f", {state.moment.partition(', for ')[0]}"
    return how + ("" if sight.stacks or sight.stopped else "; it did not report its stacks")
