"""Records when a GPU reaches the start and end of each span, because the host runs ahead of the GPU."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import replace
from typing import Any

import torch

from paceline.core.telemetry.spans import Span
from paceline.profiler.records.steps import Step

LAG = 8
"""Delay in steps before the events of a step are read. By then the device has passed them, so reading never waits."""


class DeviceTimes:
    """Replaces a step's host times with the times of events on `device`, a few steps later.

    Times add up step by step from one synchronization at the beginning, because the time between two events is a
    float32 in milliseconds, which is imprecise for long times.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pending: deque[tuple[Step, Any, Any]] = deque()
        """Steps to read, with the events of their start and end."""
        torch.accelerator.synchronize(device)
        self._begin = self.event()
        self._now = time.perf_counter()
        """Host time when the device reached the event ``_before``."""
        self._before = self._begin

    def event(self) -> Any:
        """Record an event on the device's current stream, and return it."""
        event = torch.Event(device=self._device, enable_timing=True)
        event.record()
        return event

    def step_begins(self) -> None:
        """Note that a step begins."""
        self._begin = self.event()

    def step_ends(self, step: Step) -> list[Step]:
        """Queue `step`, whose last span has ended, and return the steps whose events the device has passed."""
        self._pending.append((step, self._begin, self.event()))
        return [self._read() for _ in range(len(self._pending) - LAG)]

    def rest(self) -> list[Step]:
        """Wait for the device, and return all remaining steps."""
        torch.accelerator.synchronize(self._device)
        return [self._read() for _ in range(len(self._pending))]

    def _read(self) -> Step:
        step, begin, end = self._pending.popleft()
        end.synchronize()  # returns immediately unless the device is more than LAG steps behind
        start: float = self._now + self._before.elapsed_time(begin) / 1000
        self._now, self._before = start, begin

        def seconds(event: Any) -> float:
            elapsed: float = begin.elapsed_time(event)
            return start + elapsed / 1000

        spans = [_by_device(span, seconds) for span in step.spans]
        return replace(step, start=start, end=seconds(end), spans=spans)


def _by_device(span: Span, seconds: Any) -> Span:
    """Return `span` with device times. Marks have no events and stay unchanged."""
    if span.events is None or None in span.events:
        return span
    return span._replace(start=seconds(span.events[0]), end=seconds(span.events[1]), events=None)
