"""Pauses of Python's garbage collector, in which no thread of the process runs Python code."""

from __future__ import annotations

import gc
import time
from typing import Any


class CollectorPauses:
    """Adds up the pauses of this process while it is entered.

    They are counted in seconds of a core, so that they are no longer on a host with much other work.
    """

    def __init__(self) -> None:
        self._seconds = 0.0
        """Seconds since the last :meth:`take`."""
        self._began = 0.0
        """Moment at which the collection under way began; one never begins inside another."""

    def __enter__(self) -> CollectorPauses:
        gc.callbacks.append(self._called)
        return self

    def __exit__(self, *_: object) -> None:
        gc.callbacks.remove(self._called)

    def take(self) -> float:
        """Return the seconds since the last call."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def _called(self, phase: str, _info: dict[str, Any]) -> None:
        if phase == "start":
            self._began = time.thread_time()
        elif self._began:
            self._seconds += time.thread_time() - self._began
