"""Runs torch's profiler for a few steps of one rank."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity

from paceline.core.torch_internals import is_profiling


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
