"""torch's profiler over a few steps of one rank: its trace, and time by operator and kernel."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity


class OperatorTrace:
    """Runs torch's profiler while that is wanted, and writes its trace to `file` when it is not any more."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._profiler: Any = None

    def follow(self, *, is_wanted: bool) -> None:
        """Start or stop, if that is due."""
        if is_wanted and self._profiler is None:
            os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # or it prints when it starts and stops
            activities = [ProfilerActivity.CPU]
            if torch.cuda.is_initialized():
                activities.append(ProfilerActivity.CUDA)
            self._profiler = torch.profiler.profile(activities=activities)
            self._profiler.start()
        elif not is_wanted and self._profiler is not None:
            profiler, self._profiler = self._profiler, None
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                profiler.stop()
                profiler.export_chrome_trace(str(self._file))
