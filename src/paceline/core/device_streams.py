"""Streams of devices that queue their operations, such as GPUs. On the CPU the functions have no effect.

Only this module uses torch's streams, so that tests can replace them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor


def is_queued(device: torch.device) -> bool:
    """Return whether operations on `device` are queued, so that the host has to wait for their results."""
    return device.type != "cpu"


def is_capturing(device: torch.device) -> bool:
    """Return whether operations on `device` are captured in a CUDA graph rather than run."""
    return capture_query(device)()


def capture_query(device: torch.device) -> Callable[[], bool]:
    """Return :func:`is_capturing` for `device`, as a function that makes fewer calls."""
    return torch.cuda.is_current_stream_capturing if device.type == "cuda" else bool  # bool() is False


def new_stream(device: torch.device) -> Any:
    """Return a new stream of `device`."""
    return torch.cuda.Stream(device)


def current_stream(device: torch.device) -> Any:
    """Return the current stream of `device`."""
    return torch.cuda.current_stream(device)


def use_stream(stream: Any) -> AbstractContextManager[Any]:
    """Use `stream` in the block."""
    return torch.cuda.stream(stream)


def keep_for(stream: Any, tensor: Tensor) -> None:
    """Keep the memory of `tensor` from being reused before `stream` has finished its current work."""
    tensor.record_stream(stream)


def keep(tensor: Tensor) -> None:
    """Keep the memory of another stream's tensor from being reused before the current stream has used it."""
    if is_queued(tensor.device):
        keep_for(current_stream(tensor.device), tensor)


def may_hold(flag: Tensor) -> bool:
    """Return the value of the tensor `flag` if it can be read without waiting, else True."""
    return is_queued(flag.device) or bool(flag)


def read_later(number: Tensor) -> Callable[[], float]:
    """Copy the one-element tensor `number` to the host; return a function that waits for the copy and returns it."""
    # Pinned, because a copy to other memory would wait for the device.
    copy = torch.empty((), dtype=torch.float64, pin_memory=True, device="cpu")
    copy.copy_(number.detach().reshape(()), non_blocking=True)
    event = torch.cuda.Event()
    event.record(current_stream(number.device))

    def read() -> float:
        event.synchronize()
        return float(copy)

    return read


class SideStream:
    """A stream of `device` for work that overlaps with the caller's. On the CPU, the work runs immediately.

    Tensors created on it belong to it. Pass other tensors that it uses to :func:`keep` inside the block.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.stream = new_stream(device) if is_queued(device) else None
        """None on the CPU."""

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Run the block's operations on this stream, after the current work of the caller's stream."""
        if self.stream is None:
            yield
            return
        self.stream.wait_stream(current_stream(self._device))
        with use_stream(self.stream):
            yield
