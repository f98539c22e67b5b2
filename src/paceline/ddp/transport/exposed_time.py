"""The time that steps waited for communication."""

from __future__ import annotations

import time
from collections import deque
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from paceline.core.state.device_streams import is_capturing

MOST_PENDING = 64
"""Maximum number of measurements not read yet. If the device has reached none of them, the host is far ahead and makes
no new ones, so that events do not accumulate."""


class ExposedTime:
    """Adds up the waiting time for gradients on `device`.

    On a CPU, this is host time. A GPU waits while the host continues, so the time is measured between two events on its
    stream. Events are read in batches after the device has passed them, so the host never waits for them. Reading two
    events in every step would take several times as long as recording them.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.of_host: AbstractContextManager[Any] = self if device.type == "cpu" else nullcontext()
        """Measures the host's wait for the other ranks' reports. A no-op with a GPU, which continues meanwhile."""
        self._read = 0.0  # sum of the measurements read so far
        self._begin: Any = None  # time or event at the start of the current wait
        self._pending: deque[tuple[Any, Any]] = deque()  # start and end of unread measurements, oldest first

    @property
    def seconds(self) -> float:
        """Total seconds. On a GPU, the latest steps may be missing, because the GPU may not have finished them."""
        self._read_passed()
        return self._read

    def __enter__(self) -> None:
        if self.device.type == "cpu":
            self._begin = time.perf_counter()
        elif is_capturing(self.device) or self._is_far_ahead():
            self._begin = None  # replays of a captured graph do not run this code
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
