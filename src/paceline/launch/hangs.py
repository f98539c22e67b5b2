"""Finds ranks that make no progress: those that the others wait for, and those that somebody has stopped.

Progress is any change in a rank's black box. A rank in the first step may compile, one that saves may have much to
write, and what one rank does in the script's own code while nobody waits for it may be an evaluation: they have
:data:`PATIENCE` times as long. A rank without a box has no phases, so only that it was stopped can be told.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from paceline.black_box import WAITING, Snapshot, path_of, process_state, read_box
from paceline.launch import told_stacks
from paceline.launch.failure import End, missed, quoted
from paceline.launch.state import doings, state_of

PATIENCE = 10
"""Times the timeout."""
BETWEEN_S = 0.2
"""Between two looks."""
LONGEST_S = 1.0
"""Counted for two looks: a launcher that was stopped together with its ranks must not take that for a hang."""


@dataclass(frozen=True)
class Sight:
    """A rank at one look."""

    rank: int
    box: Snapshot | None
    process: str
    """The state of its process, a letter of /proc; empty if that is not known."""
    still: float
    """Seconds for which its box has not changed."""
    stopped: float
    """Seconds for which its process was stopped."""

    @property
    def waits(self) -> bool:
        """Whether it waits for other ranks."""
        return self.box is not None and self.box.phase in WAITING and self.process != "T"

    def is_still(self, timeout: float, is_missed: bool) -> bool:
        """Return whether it has made no progress for too long; `is_missed` says that others wait for it."""
        if self.box is None:
            return False
        is_long = self.box.steps == 0 or self.box.phase == "checkpoint" or (self.box.phase == "loop" and not is_missed)
        return self.still >= (PATIENCE if is_long else 1) * timeout


@dataclass(frozen=True)
class Hang:
    """Ranks that make no progress, and what is known of all."""

    ranks: tuple[int, ...]
    """The ranks that the others wait for; all of them if each waits for another."""
    details: Mapping[int, str]
    """How each of these hangs."""
    stacks: Mapping[int, str] = field(default_factory=dict)
    """Of all ranks that have told them."""

    def lines(self, sights: Sequence[Sight]) -> list[str]:
        """Return what to tell the user: the ranks, their stacks, and what the others wait in."""
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
        call = waiting_call(self.stacks.get(rank, ""))
        return f", in {call}()" if call else ""


def hanging(sights: Sequence[Sight], timeout: float) -> tuple[int, ...]:
    """Return the ranks that hang: stopped ones, else those that others wait for, else all if all are still."""
    if stopped := tuple(each.rank for each in sights if each.stopped >= timeout):
        return stopped
    is_missed = any(each.waits for each in sights)
    if still := tuple(each.rank for each in sights if not each.waits and each.is_still(timeout, is_missed)):
        return still
    if sights and all(each.waits and each.is_still(timeout, is_missed) for each in sights):
        return tuple(each.rank for each in sights)
    return ()


def without_waiting(ranks: tuple[int, ...], told: Mapping[int, str]) -> tuple[int, ...]:
    """Return those of the hanging `ranks` that are in no collective by their stacks, unless all are."""
    rest = tuple(rank for rank in ranks if not waiting_call(told.get(rank, "")))
    return rest or ranks


def waiting_call(told: str) -> str:
    """Return the function of torch.distributed in which a rank with these stacks waits; empty if it is in none."""
    call = ""
    for frame in told_stacks.main_thread(told):  # the outermost of torch's own frames is what the script has called
        if "torch/distributed/" not in frame and "paceline/rollcall" not in frame:
            return call
        name = frame.rpartition(" in ")[2]
        call = call if name in ("wrapper", "_wait") else name
    return call


class HangWatch:
    """Watches the ranks of the present start.

    Args:
        folder: the job's; None if it has none, then nothing is noticed.
        timeout: seconds without progress; None to watch nothing.
        kills: whether ranks that hang are to be killed, so that one that was stopped may be continued for its stacks.
    """

    def __init__(self, folder: Path | None, timeout: float | None, kills: bool) -> None:
        self._folder, self._timeout, self._kills = folder, timeout, kills
        self.begin()

    def begin(self) -> None:
        """Forget the ranks of the start before."""
        self._stacks: dict[int, str] = {}
        """Those that ranks have told."""
        self._looked = 0.0
        """When the ranks were last looked at."""
        self._still: dict[int, tuple[Snapshot | None, float]] = {}
        """The box of each rank, and for how long it has been so."""
        self._stopped: dict[int, float] = {}
        """For how long each rank's process has been stopped."""
        self._reported: set[int] = set()
        """Ranks that were told in a hang, and have hung since."""
        self._killed: dict[int, str] = {}
        """How the ranks hung that were killed for it."""

    def look(self, processes: Mapping[int, int], say: Callable[[str], None]) -> None:
        """Look for a hang that was not found before; tell the user, and kill who hangs if that is wanted.

        Args:
            processes: of the ranks that run, by rank.
            say: tells the user.
        """
        now = time.monotonic()
        if self._timeout is None or self._folder is None or now - self._looked < BETWEEN_S:
            return
        passed = min(now - self._looked, LONGEST_S) if self._looked else 0.0
        self._looked = now
        sights = [self._see(rank, pid, passed) for rank, pid in processes.items()]
        ranks = hanging(sights, self._timeout)
        self._reported &= set(ranks)
        if not set(ranks) - self._reported:
            return
        by_rank = {each.rank: each for each in sights}
        stopped = [rank for rank in ranks if by_rank[rank].stopped]
        told = told_stacks.ask(self._folder, {rank: pid for rank, pid in processes.items() if rank not in stopped})
        if not stopped:
            ranks = without_waiting(ranks, told)
        elif self._kills:
            told |= _stacks_of_stopped(self._folder, stopped, processes)
        self._reported |= set(ranks)
        hang = Hang(ranks, {rank: _detail(by_rank[rank], told.get(rank, "")) for rank in ranks}, told)
        self._stacks |= told
        say("\n".join(hang.lines(sights)))
        if self._kills:
            self._kill(hang, processes)

    def pause(self, seconds: float) -> float:
        """Return how long to wait until the next look, at most `seconds`."""
        return seconds if self._timeout is None else min(seconds, BETWEEN_S)

    def ask_absent(self, ends: Sequence[End], processes: Mapping[int, int]) -> None:
        """Ask the ranks for their stacks that kept the others waiting, and are about to be ended for that."""
        absent = {end.rank: processes[end.rank] for end in missed(ends) if end.rank in processes}
        if self._folder is not None:
            self._stacks |= told_stacks.ask(self._folder, absent, resume=True)

    def told(self, ends: Sequence[End]) -> list[End]:
        """Return `ends` with the hangs that were found, and all stacks that were told."""
        return [
            replace(end, hang=self._killed.get(end.rank, ""), stacks=self._stacks.get(end.rank, "")) for end in ends
        ]

    def _kill(self, hang: Hang, processes: Mapping[int, int]) -> None:
        """Kill the ranks that the others wait for; if all wait, only the last one, as the others notice that."""
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
        process = process_state(pid)
        self._stopped[rank] = self._stopped.get(rank, 0.0) + passed if process == "T" else 0.0
        return Sight(rank, box, process, still, self._stopped[rank])


def _stacks_of_stopped(folder: Path, stopped: Sequence[int], processes: Mapping[int, int]) -> dict[int, str]:
    """Return the stacks of the `stopped` ranks, which are continued for that, while the others are held.

    On its own no rank ends a step, so it changes nothing that others see before it is killed.
    """
    others = [pid for rank, pid in processes.items() if rank not in stopped]
    try:
        _send(others, signal.SIGSTOP)
        return told_stacks.ask(folder, {rank: processes[rank] for rank in stopped}, resume=True)
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
