"""Capture of a step in a CUDA graph; a feature that a graph cannot replay raises an error that names it."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from paceline.core.state.device_streams import is_capturing
from paceline.ddp.reducer.backward import Backward
from paceline.ddp.reducer.extension import Extension
from paceline.errors import UsageError

CHECK_FINITE = "check_finite=True, because the host reads the result"


class GraphCapture(Extension):
    """Refuses to capture a backward pass that needs the host, because a graph replays only device operations.

    Args:
        device: the device of the gradients.
        rank: this rank.
        unfit: functions that return whether a feature is in use, keyed by the feature's name in the error.
    """

    def __init__(self, device: torch.device, rank: int, unfit: Mapping[str, Callable[[], bool]]) -> None:
        self._device, self._rank, self._unfit = device, rank, unfit

    def is_active(self) -> bool:
        """Return whether a CUDA graph can be captured on the device."""
        return self._device.type == "cuda"

    def check_change(self) -> None:
        if is_capturing(self._device):
            raise cannot_capture("the first step after parameters were added or unfrozen", self._rank)

    def begin(self, backward: Backward) -> None:
        """Refuse to capture the backward pass if a feature is in use that a graph cannot replay."""
        if is_capturing(self._device):
            for name, is_used in self._unfit.items():
                if is_used():
                    raise cannot_capture(name, self._rank)


def cannot_capture(name: str, rank: int) -> UsageError:
    """Return the error for a feature that a CUDA graph cannot capture."""
    return UsageError(
        f"rank {rank}: a CUDA graph cannot capture {name}; leave it out, or train this step without a graph; see "
        "docs/gpu.md"
    )
