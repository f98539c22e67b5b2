"""Streams of a device that queues its operations, such as a GPU; on the CPU, which queues nothing, all do nothing.

This is the one place that asks torch for streams, so that tests can put others here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor


def is_queued(device: torch.device) -> bool:
    """Return whether operations on `device` are queued, so that the host waits where it reads their results."""
    return device.type != "cpu"


def is_capturing(device: torch.device) -> bool:
    """Return whether operations on `device` are captured in a CUDA graph rather than run."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def new_stream(device: torch.device) -> Any:
    """Return a stream of `device` that no one else uses."""
    return torch.cuda.Stream(device)


def current_stream(device: torch.device) -> Any:
    """Return the stream on which operations on `device` are queued now."""
    return torch.cuda.current_stream(device)


def use_stream(stream: Any) -> AbstractContextManager[Any]:
    """Queue operations on `stream` inside."""
    return torch.cuda.stream(stream)


def keep_for(stream: Any, tensor: Tensor) -> None:
    """Keep the memory of `tensor`, when it is dropped, until `stream` has done its work so far."""
    tensor.record_stream(stream)


def keep(tensor: Tensor) -> None:
    """Keep the memory of a tensor that another stream may have made, until the current one has used it."""
    if is_queued(tensor.device):
        keep_for(current_stream(tensor.device), tensor)


def may_hold(flag: Tensor) -> bool:
    """Return whether `flag`, one truth value, may hold: its value if reading it is free, else True."""
    return is_queued(flag.device) or bool(flag)


def read_later(number: Tensor) -> Callable[[], float]:
    """Send `number`, one element, to the host; returns a function that waits for it, but not for later operations."""
    # Pinned, because a copy into other memory makes the host wait for the device at once.
    copy = torch.empty((), dtype=torch.float64, pin_memory=True)
    copy.copy_(number.detach().reshape(()), non_blocking=True)
    event = torch.cuda.Event()
    event.record(current_stream(number.device))

    def read() -> float:
        event.synchronize()
        return float(copy)

    return read


class SideStream:
    """A stream of `device` for work that overlaps with the caller's; on the CPU the work is done in place.

    Tensors that are made on it belong to it. Pass tensors that it only uses to :func:`keep` inside the block.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.stream = new_stream(device) if is_queued(device) else None
        """None on the CPU."""

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Queue operations here, behind those that the caller's stream has been given so far."""
        if self.stream is None:
            yield
            return
        self.stream.wait_stream(current_stream(self._device))
        with use_stream(self.stream):
            yield
