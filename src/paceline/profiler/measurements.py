"""What a rank measures of its steps, apart from spans: batch sizes, gradient norms, times on a GPU, and operators."""

from __future__ import annotations

import math
import os
import time
import warnings
from collections import deque
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity

from paceline.core.spans import LAUNCH, WAIT, Span
from paceline.core.torch_internals import is_profiling
from paceline.nn.data_parallel import nested_tensors
from paceline.profiler.steps import Step

EVERY, SEEN = (4, 16), 48
"""Steps between two measurements, in the first ``SEEN`` steps and later. Each costs two passes over the gradients."""
LAG = 8
"""Delay in steps before the events of a step are read. By then the device has passed them, so reading never waits."""


class Forwards:
    """The forward passes of a step, by model. Several models in a program may process the same samples."""

    def __init__(self) -> None:
        self._by_model: dict[int, tuple[int, int, int]] = {}

    def add(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Count a forward pass of `model` with these arguments."""
        number, rows, cells = self._by_model.get(id(model), (0, 0, 0))
        more, cells_more = size_of_input(args, kwargs)
        self._by_model[id(model)] = number + 1, rows + more, cells + cells_more

    def describe(self, step: Step) -> None:
        """Set the batches of `step` from the model with the most samples, and count the averaging backward passes."""
        step.batches, step.rows, step.cells = max(self._by_model.values(), default=(0, 0, 0))
        # Averaging gradients launches every bucket once. With torch's wrapper only the wait is visible.
        first = sum(span.label == LAUNCH and span.bucket == 0 for span in step.spans)
        averages = first or sum(span.label == WAIT for span in step.spans)
        step.averages = min(step.batches, averages // max(1, len(self._by_model)))

    def __len__(self) -> int:
        """Return the number of models."""
        return len(self._by_model)


def size_of_input(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, int]:
    """Return the rows and cells (rows times columns, including padding) of the first tensor among the inputs."""
    first = args[0] if args else None  # the only input of most models
    if not (isinstance(first, torch.Tensor) and first.dim()):
        first = next((tensor for tensor in nested_tensors((args, kwargs)) if tensor.dim()), None)
    return (0, 0) if first is None else (len(first), math.prod(first.shape[:2]))


def are_due(step: int) -> bool:
    """Return whether to measure a step."""
    return step % EVERY[step >= SEEN] == 0


class GradientNorms:
    """Norms of the buckets of a step. They are kept as tensors, because a device computes asynchronously."""

    def __init__(self) -> None:
        self._local: list[tuple[Tensor, float]] = []
        self._averaged: list[Tensor] = []

    def launched(self, flat: Tensor, factor: float) -> None:
        """Compute the norm of a bucket that holds `factor` times the mean gradient over this rank's samples."""
        if factor:  # 0 on a rank without samples
            self._local.append((torch.linalg.vector_norm(flat), factor))

    def averaged(self, flat: Tensor) -> None:
        """Compute the norm of a bucket of averaged gradients."""
        self._averaged.append(torch.linalg.vector_norm(flat))

    def squared(self) -> tuple[float, float] | None:
        """Return the squared norms of this rank's gradient and of the average; None unless both exist and are finite.

        Waits for the device.
        """
        if not (self._local and self._averaged):
            return None
        local = math.fsum((float(norm) / factor) ** 2 for norm, factor in self._local)
        averaged = math.fsum(float(norm) ** 2 for norm in self._averaged)
        return (local, averaged) if math.isfinite(local + averaged) else None


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


class OperatorTrace:
    """Runs torch's profiler on request, and writes its trace to `file`.

    Two profilers in one process cause a segmentation fault, so this one yields to the program's own.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self._profiler: Any = None
        self._is_starting = False
        """Whether this profiler is starting."""
        self.has_given_way = False
        """Whether the program itself used a torch profiler."""

    def follow(self, *, is_wanted: bool) -> None:
        """Start or stop as requested."""
        if is_wanted and self._profiler is None:
            self.has_given_way = self.has_given_way or is_profiling()
            if not self.has_given_way:
                self._start()
        elif not is_wanted and self._profiler is not None:
            profiler = self._stop()
            profiler.export_chrome_trace(str(self._file))

    def give_way(self) -> None:
        """End this profiler without a trace, because another torch profiler is starting."""
        if self._is_starting:
            return
        self.has_given_way = True
        if self._profiler is not None:
            self._stop()

    def drop(self) -> None:
        """Forget a profiler that runs in this process's parent."""
        self._profiler = None

    def _start(self) -> None:
        os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # silences Kineto
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_initialized():
            activities.append(ProfilerActivity.CUDA)
        profiler = torch.profiler.profile(activities=activities)
        # Starting any profiler calls give_way().
        self._is_starting = True
        try:
            with warnings.catch_warnings():
                # Torch 2.11 warns that a profiler drops earlier cycles. This one has only one cycle.
                warnings.filterwarnings("ignore", "Warning: Profiler clears events")
                profiler.start()
        finally:
            self._is_starting = False
        self._profiler = profiler

    def _stop(self) -> Any:
        profiler, self._profiler = self._profiler, None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            profiler.stop()
        return profiler
