"""Records signals to the launcher until it handles them."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

from paceline.core.telemetry.step_progress import ECHO_S

FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1)

# torchelastic's signal handler may raise at any point, so install it only for this signal, which is never sent.
SPARE = signal.SIGURG

HELD_BACK = {*FORWARDED, signal.SIGUSR2}
"""Signals that batch systems, service managers and terminals send to all processes of a job."""


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
