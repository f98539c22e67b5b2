"""Capture of a step in a CUDA graph. Features that a graph cannot replay are refused by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from paceline.core.state.device_streams import is_capturing
from paceline.ddp.reducer.backward import Backward
from paceline.ddp.reducer.extension import Extension
from paceline.errors import UsageError

CHECK_FINITE = "check_finite=True, which the host reads"


class GraphCapture(Extension):
    """Refuses to have a backward captured that does more than a graph replays, which are operations of the device.

    Args:
        device: where gradients are.
        rank: this one.
        unfit: by what is named in the error, returns whether that is in use.
    """

    def __init__(self, device: torch.device, rank: int, unfit: Mapping[str, Callable[[], bool]]) -> None:
        self._device, self._rank, self._unfit = device, rank, unfit

    def is_active(self) -> bool:
        """Whether there may be a CUDA graph."""
        return self._device.type == "cuda"

    def begin(self, backward: Backward) -> None:
        """Refuse the backward if it is captured and cannot be.

        Raises:
            UsageError: for the first such thing; names it.
        """
        if is_capturing(self._device):
            for name, is_used in self._unfit.items():
                if is_used():
                    raise cannot_capture(name, self._rank)


def cannot_capture(name: str, rank: int) -> UsageError:
    """Return the error for something that is in a step and that a CUDA graph cannot capture."""
    return UsageError(
        f"rank {rank}: a CUDA graph cannot capture {name}; leave it out, or train this step without a graph; "
        "docs/nccl.md has the rules"
    )
