"""Signals to the launcher, kept until it can act on them."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1)

# torchelastic may handle this signal by raising at any point, which is harmless because it is never sent.
SPARE = signal.SIGURG

# timeout(1) and others signal the process and then its group: that is one request to end, not two.
ECHO_S = 0.2


HELD_BACK = {*FORWARDED, signal.SIGUSR2}
"""Signals that batch systems, service managers and terminals may send to all processes of a job."""


@contextmanager
def sheltered() -> Iterator[None]:
    """Start processes inside that signals to the whole job do not end: they inherit a mask that holds these back.

    Ranks that need such a process get the same signals, and so does the launcher, which ends it in time.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, HELD_BACK)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class Stopped(Exception):
    """The launcher or a rank was told to end, and all ranks have ended.

    ``saved`` is the step that they had agreed on and saved; None if they did not save.
    """

    def __init__(self, number: signal.Signals, saved: int | None = None) -> None:
        super().__init__(f"stopped by {number.name}")
        self.number, self.saved = number, saved


class Caught:
    """A context manager that notes signals instead of raising, so that none arrives between two ranks' starts.

    A signal that the parent had ignored (``nohup``) stays ignored, SIGINT excepted: shells ignore it for
    background jobs, which ``kill -INT`` should end all the same. Without effect outside the main thread.
    """

    def __init__(self, signals: Sequence[signal.Signals] = FORWARDED) -> None:
        self.received: list[signal.Signals] = []
        self._signals = signals
        self._last = 0.0
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Caught:
        if threading.current_thread() is threading.main_thread():
            self._before[SPARE] = signal.getsignal(SPARE)
            for number in self._signals:
                if number == signal.SIGINT or signal.getsignal(number) != signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)

    def _note(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if not self.received or now - self._last > ECHO_S:
            self.received.append(signal.Signals(number))
            self._last = now
