"""Delays a device's work, so that code that fails to wait computes wrong numbers.

On a GPU, autograd returns a gradient as soon as its kernels are launched. Code that reads the gradient on another
stream without waiting may happen to work on an idle GPU, but not after a sleeping kernel.
"""

from __future__ import annotations

import threading
import time
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn

import paceline

CYCLES = 20_000_000
"""Clock cycles that a kernel sleeps, about 10 ms."""
SECONDS_ON_CPU = 0.002


class Lateness(Enum):
    """Which work in backward is delayed."""

    NONE = "nothing"
    GRADIENTS = "gradients"
    """Kernels of gradients are launched but have not run, so code that does not wait for them reads too early."""
    OTHER_STREAMS = "other streams"
    """Other streams start when the training stream is far ahead, so memory that is freed too early is overwritten."""


def pause(device: torch.device) -> None:
    """Keep the current stream busy for some milliseconds."""
    if device.type == "cuda":
        torch.cuda._sleep(CYCLES)
    else:
        time.sleep(SECONDS_ON_CPU)


def delay_other_streams(device: torch.device) -> None:
    """Make every other stream in PyTorch's pool sleep once the current stream reaches this point."""
    if device.type != "cuda":
        return
    current = torch.cuda.current_stream(device)
    here = current.record_event()
    for priority in (0, -1):
        for _ in range(32):  # PyTorch returns its 32 streams per priority in turn
            stream = torch.cuda.Stream(device, priority=priority)
            if stream != current:
                with torch.cuda.stream(stream):
                    here.wait(stream)
                    torch.cuda._sleep(CYCLES // 4)


def poison(device: torch.device, dtype: torch.dtype) -> None:
    """Fill memory that has just been freed with NaN, so that a late read returns NaN."""
    numels = (4160, 8320, 4096, 2080)  # sizes of the buckets of :class:`Slow`, and of their parts
    kept = [torch.full((numel,), torch.nan, device=device, dtype=dtype) for numel in numels for _ in range(2)]
    del kept


class Late(torch.autograd.Function):
    """The identity function. Its backward overwrites freed memory and delays other work."""

    @staticmethod
    def forward(context: Any, x: Tensor, lateness: Lateness) -> Tensor:
        context.lateness = lateness
        return x.clone()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:
        for dtype in {gradient.dtype, torch.float32}:  # residuals are in float32
            poison(gradient.device, dtype)
        if context.lateness is Lateness.GRADIENTS:
            pause(gradient.device)
        else:
            delay_other_streams(gradient.device)
        return gradient.clone(), None


class Slow(nn.Module):
    """Layers with delays between their gradients; forward returns the loss."""

    def __init__(self, lateness: Lateness) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(6))
        self.lateness = lateness

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
            if self.lateness is not Lateness.NONE:
                x = Late.apply(x, self.lateness)  # type: ignore[no-untyped-call]
        return x.float().square().mean()


class Fault(Enum):
    """A wait that is omitted on purpose, to show that the checks detect it."""

    NONE = "no wait is missing"
    LAUNCH = "the stand-in does not wait for the gradients"
    READ = "the average is read without waiting for the stand-in"


class StandIn:
    """Replaces the all-reduce of buckets on a single rank by an operation that behaves like NCCL on two ranks.

    It runs late on a separate stream, after the work of the launching stream, and doubles the bucket, as if a second
    rank had equal gradients. On the CPU, a thread does the same. The control block is not affected.
    """

    def __init__(self, model: paceline.DistributedDataParallel, fault: Fault = Fault.NONE) -> None:
        reducer = model._engine.connected()
        assert model._connection is not None
        self._storage, self._channel, self._fault = reducer.buckets, model._connection.channel, fault
        self._all_reduce = self._channel.all_reduce
        self._stream = torch.cuda.Stream(model.device) if model.device.type == "cuda" else None
        self.launched = 0
        self._channel.all_reduce = self.all_reduce  # type: ignore[method-assign]

    def all_reduce(self, tensor: Tensor, *arguments: Any, **options: Any) -> Any:
        """Double a bucket after a delay; pass any other tensor to the channel."""
        if not any(tensor is bucket.memory for bucket in self._storage.buckets):
            return self._all_reduce(tensor, *arguments, **options)
        self.launched += 1
        if self._stream is None:
            return _InThread(tensor, self._fault)
        return _OnStream(tensor, self._stream, self._fault)


class _OnStream:
    """Doubles a tensor after a delay, on a separate stream."""

    def __init__(self, tensor: Tensor, stream: torch.cuda.Stream, fault: Fault) -> None:
        self._fault, self._event = fault, torch.cuda.Event()
        if fault is not Fault.LAUNCH:
            stream.wait_stream(torch.cuda.current_stream(tensor.device))
        with torch.cuda.stream(stream):
            if fault is not Fault.LAUNCH:  # without the sleep, it runs before the late gradients
                torch.cuda._sleep(CYCLES)
            tensor.mul_(2)
            self._event.record(stream)
        tensor.record_stream(stream)

    def is_completed(self) -> bool:
        return bool(self._event.query())

    def wait(self) -> None:
        """Make the current stream wait without blocking the host."""
        if self._fault is not Fault.READ:
            self._event.wait(torch.cuda.current_stream())


class _InThread:
    """Doubles a tensor after a delay, in a thread."""

    def __init__(self, tensor: Tensor, fault: Fault) -> None:
        self._tensor, self._fault = tensor, fault
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    @torch.no_grad()
    def _run(self) -> None:
        if self._fault is not Fault.LAUNCH:
            time.sleep(SECONDS_ON_CPU if self._fault is Fault.NONE else 0.1)  # longer than delays on a busy machine
        self._tensor.mul_(2)

    def is_completed(self) -> bool:
        return not self._thread.is_alive()

    def wait(self) -> None:
        """Wait for the thread."""
        if self._fault is not Fault.READ:
            self._thread.join()
