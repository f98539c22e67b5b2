"""Signals to the launcher, passed on to the ranks, which may save a step before they exit."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

from paceline.core.step_progress import ECHO_S, Stopping, present_records

FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1)
SPARE = signal.SIGURG
"""A signal that is never sent. torchelastic's signal handler may raise at any point, so it is installed only for this
signal."""
HELD_BACK = {*FORWARDED, signal.SIGUSR2}
"""Signals that batch systems, service managers and terminals send to all processes of a job."""


class Preemption:
    """How the ranks of the current start react to a signal, according to their step records.

    Args:
        folder: the job's folder.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def would_save(self, pids: Collection[int]) -> bool:
        """Return whether every rank would save a step and exit after a signal, or has already done so."""
        states = self._states()
        return bool(pids) and all(states.get(pid) in (Stopping.READY, Stopping.ASKED, Stopping.SAVED) for pid in pids)

    def are_ready(self, pids: Collection[int]) -> bool:
        """Return whether every rank would save a step and exit after a signal, and none has received one yet."""
        states = self._states()
        return bool(pids) and all(states.get(pid) is Stopping.READY for pid in pids)

    def is_in_vain(self) -> bool:
        """Return whether the ranks mark their steps, but have no checkpoint folder on disk."""
        states = self._states().values()
        return bool(states) and set(states) == {Stopping.IN_VAIN}

    def request_stop(self, number: signal.Signals, pids: Collection[int]) -> None:
        """Send the signal to ranks that have not received one, because a second signal would end a rank at once.

        Their child processes get no signal, because DataLoader workers are needed until the end of the step. Ranks get
        SIGTERM instead of signals that a script may handle itself, such as SIGINT.
        """
        sent = number if number == signal.SIGUSR1 else signal.SIGTERM
        for pid, state in self._states().items():
            if pid in pids and state is Stopping.READY:
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, sent)

    def saved(self) -> tuple[signal.Signals, int] | None:
        """Return the signal and the step if all ranks have agreed to exit and saved the step; otherwise None."""
        for records in present_records(self._folder).values():
            for record in records:
                if record.stopping is Stopping.SAVED:  # on all ranks
                    number, step = record.stopped
                    return signal.Signals(number), step
        return None

    def _states(self) -> dict[int, Stopping]:
        """Return each rank's state by process id; with several Checkpointers, the most advanced state."""
        states: dict[int, Stopping] = {}
        for records in present_records(self._folder).values():
            for record in records:
                states[record.pid] = max(record.stopping, states.get(record.pid, Stopping.NOT))
        return states


@contextmanager
def sheltered() -> Iterator[None]:
    """Make processes started inside this context block signals to the whole job, because ranks need the processes.

    The launcher also receives these signals, and terminates the processes after the ranks.
    """
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, HELD_BACK)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


class Stopped(Exception):
    """Raised after the launcher or a rank has received a signal and all ranks have exited.

    ``saved`` is the step that the ranks agreed on and saved; None if they saved none.
    """

    def __init__(self, number: signal.Signals, saved: int | None = None) -> None:
        super().__init__(f"stopped by {number.name}")
        self.number, self.saved = number, saved


class Caught:
    """A context manager that records signals, so that no signal interrupts the start of the ranks.

    Signals that the parent process ignores (``nohup``) stay ignored, except SIGINT: shells ignore it for background
    jobs, but ``kill -INT`` should still end them. Has no effect outside the main thread.
    """

    def __init__(self, signals: Sequence[signal.Signals] = FORWARDED) -> None:
        self.received: list[signal.Signals] = []
        self._signals = signals
        self._last = 0.0
        self._handlers: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Caught:
        if threading.current_thread() is threading.main_thread():
            self._handlers[SPARE] = signal.getsignal(SPARE)
            for number in self._signals:
                if number == signal.SIGINT or signal.getsignal(number) != signal.SIG_IGN:
                    self._handlers[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)

    def _note(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if not self.received or now - self._last > ECHO_S:
            self.received.append(signal.Signals(number))
            self._last = now
