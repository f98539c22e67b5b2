"""Sends a message to ranks and handles output, errors, deaths, hangs and interrupts until they have answered."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from typing import Any

from paceline.core.host import busy_seconds
from paceline.core.missing_ranks import named_ranks, ranks_by_value
from paceline.errors import PacelineError
from paceline.launch import hang_detection
from paceline.launch.hang_detection import ENGINE, PLACE, waiting_frames
from paceline.launch.signals import Caught
from paceline.tools.notebook.messages import Failure
from paceline.tools.notebook.output import Screen
from paceline.tools.notebook.processes import Processes

_CELL = re.compile(r"<ipython-input-(\d+)-")
_WRAPPER = "/paceline/ddp/"
# Wrapper functions of torch, which are not reported; users know the wrapped function.
_WRAPPERS = {"wrapper", "decorate_context", "__call__", "_wrapped_call_impl", "_call_impl"}
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
        stacks = hang_detection.request_stacks(self._processes.boxes.path, pids)
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


@dataclass(frozen=True)
class Wait:
    """A call that waits for other ranks."""

    call: str
    """Name of the function that the cell called."""
    place: str
    """Cell and line; empty if the call is not in a cell."""
    is_sure: bool = True
    """Whether the stack alone is proof. Backward, and the wrapper's own code, may also be computing; a rank that waits
    in them is asleep."""

    def __str__(self) -> str:
        return f"{self.call}() ({self.place})" if self.place else f"{self.call}()"


def wait_in(stacks: str) -> Wait | None:
    """Return the call that waits for other ranks, or None if these stacks show no such call."""
    frames = waiting_frames(stacks, also=_WRAPPER)
    if not frames:
        return None
    is_sure, call = ENGINE.search(frames[0]) is None and _WRAPPER not in frames[0], ""
    for frame in filter(None, map(PLACE.search, frames)):
        file, line, function = frame.groups()
        if cell := _CELL.match(file):
            return Wait(call, f"In[{cell[1]}], line {line}", is_sure)
        if "/paceline/tools/notebook/" in file:
            break
        call = call if function in _WRAPPERS and call else function
    return Wait(call, "", is_sure)


class Shown(PacelineError):
    """An error that the notebook shows as `lines`, without the kernel's traceback."""

    def __init__(self, name: str, lines: list[str]) -> None:
        super().__init__("\n".join(lines))
        self.name, self.lines = name, lines

    def _render_traceback_(self) -> list[str]:
        return self.lines


def problem(outcome: Outcome, size: int) -> Shown | None:
    """Return the error to show for a cell on a world of `size` ranks, or None if the cell succeeded.

    Original errors come first, with their tracebacks. A failure caused by another rank is shown in one line.
    """
    failures = {
        rank: failure
        for rank, failure in outcome.failures.items()
        if not (failure.is_interrupt and (outcome.interrupted or rank in outcome.waits))
    }
    causes = {rank: failure for rank, failure in failures.items() if not failure.breaks_group} or (
        {} if outcome.deaths else failures
    )
    consequences = {rank: failure for rank, failure in failures.items() if rank not in causes}
    lines: list[str] = []
    for failure, ranks in ranks_by_value(sorted(causes.items())).items():
        lines += [f"{_who(ranks, size)} raised {failure.name}:", *failure.trace]
    for rank, how in sorted(outcome.deaths.items()):
        if rank not in outcome.killed:
            lines.append(f"rank {rank} died: {how}")
        elif rank not in outcome.waits:
            lines.append(f"rank {rank} ignored the interrupt and was killed")
    for failure, ranks in ranks_by_value(sorted(consequences.items())).items():
        first = failure.message.strip().partition("\n")[0]
        lines.append(f"{_who(ranks, size)} failed as a result ({failure.name}: {first})")
    for rank, where in sorted(outcome.waits.items()):
        how = "killed, because it ignored the interrupt" if rank in outcome.killed else "interrupted"
        lines.append(f"rank {rank} {where}, and was {how}")
    if outcome.interrupted:
        lines.append("interrupted: all ranks have stopped")
    if not lines:
        return None
    if causes:
        name = min(causes.items())[1].name
    elif outcome.interrupted:
        name = "KeyboardInterrupt"
    else:
        name = "RankDied" if outcome.deaths.keys() - outcome.killed else "DesyncError"
    return Shown(name, lines)


def replaced(ranks: list[int], size: int) -> list[str]:
    """Return the line to show once all ranks have a new process group; `ranks` were restarted."""
    group = "all ranks have a new process group: wrap models and create device meshes again"
    if not ranks:
        return [f"{group}; variables are kept"]
    who = _who(ranks, size)
    return [f"{who} restarted without variables: rerun the cells that define them. {group.capitalize()}"]


def _who(ranks: list[int], size: int) -> str:
    return f"all {size} ranks" if len(ranks) == size > 1 else named_ranks(ranks)
