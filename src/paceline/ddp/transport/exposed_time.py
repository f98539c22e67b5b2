"""The time that steps waited for communication."""

from __future__ import annotations

import time
from collections import deque
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from paceline.core.state.device_streams import is_capturing

MOST_PENDING = 64
"""Largest number of measurements that are not read yet. If the device has come to none of them, the host is far ahead,
and makes no new ones, so that events do not pile up."""


class ExposedTime:
    """Adds up the waiting time for gradients on `device`.

    On the CPU that is the host's time. A GPU waits while the host goes on, so there it is the time between two events
    on its stream. They are read many at once, when the device has passed them, so that the host never waits for them;
    reading two of them in each step costs several times as much as recording them.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.of_host: AbstractContextManager[Any] = self if device.type == "cpu" else nullcontext()
        """Adds up a wait of the host for the other ranks' reports; no effect beside a GPU, which goes on meanwhile."""
        self._read = 0.0  # the sum of measurements that were read
        self._begin: Any = None  # the time or event at the beginning of the present wait
        self._pending: deque[tuple[Any, Any]] = deque()  # begin and end of each other measurement, the oldest first

    @property
    def seconds(self) -> float:
        """Seconds; on a GPU without the latest steps, which it may not have finished."""
        self._read_passed()
        return self._read

    def __enter__(self) -> None:
        if self.device.type == "cpu":
            self._begin = time.perf_counter()
        elif is_capturing(self.device) or self._is_far_ahead():
            self._begin = None  # replays of a captured graph do not come here
        else:
            self._begin = self._event()
            self._begin.record()

    def __exit__(self, *_: object) -> None:
        if self.device.type == "cpu":
            self._read += time.perf_counter() - self._begin
        elif self._begin is not None:
            end = self._event()
            end.record()
            self._pending.append((self._begin, end))

    def _read_passed(self) -> None:
        while self._pending and self._pending[0][1].query():
            begin, end = self._pending.popleft()
            self._read += begin.elapsed_time(end) / 1000

    def _is_far_ahead(self) -> bool:
        if len(self._pending) < MOST_PENDING:
            return False
        self._read_passed()
        return len(self._pending) >= MOST_PENDING

    def _event(self) -> Any:
        return torch.Event(device=self.device, enable_timing=True)
