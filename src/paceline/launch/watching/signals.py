"""Records signals to the launcher until it handles them."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1)

# torchelastic's signal handler may raise at any point, so install it only for this signal, which is never sent.
SPARE = signal.SIGURG

# timeout(1) signals the process and then its group. Both signals count as one request to end.
ECHO_S = 0.2

HELD_BACK = {*FORWARDED, signal.SIGUSR2}
"""Signals that batch systems, service managers and terminals send to all processes of a job."""


@contextmanager
def sheltered() -> Iterator[None]:
    """Make processes started inside block signals to the whole job; ranks need these processes until the ranks end.

    The launcher also gets the signals, and ends the processes itself.
    """
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, HELD_BACK)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


class Stopped(Exception):
    """The launcher or a rank received a signal, and all ranks have ended.

    ``saved`` is the step that the ranks agreed on and saved; None if they did not save.
    """

    def __init__(self, number: signal.Signals, saved: int | None = None) -> None:
        super().__init__(f"stopped by {number.name}")
        self.number, self.saved = number, saved


class Caught:
    """A context manager that records signals so that none of them interrupts the start of the ranks.

    A signal that the parent ignores (``nohup``) stays ignored. SIGINT is handled even then: shells ignore it for
    background jobs, which ``kill -INT`` should still end. Has no effect outside the main thread.
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
