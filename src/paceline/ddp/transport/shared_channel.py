"""A wrapper's channel among ranks that share memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from paceline.comm.shm.header import Note
from paceline.ddp.agreement.weighting import compute_scale
from paceline.ddp.transport.channel import Channel, Launched


class SharedChannel(Channel):
    """A channel through shared memory: buckets are reduced where they lie, by the hooks of backward."""

    scales = True

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device | str = "cpu") -> Tensor:
        """Allocate a zeroed flat tensor in shared memory."""
        tensor: Tensor = self.group.allocate(numel, dtype)
        return tensor

    def free(self, tensor: Tensor) -> None:
        """Give its memory back to the host."""
        self.group.free(tensor)

    def all_reduce(self, tensor: Tensor, note: Note | None = None) -> Launched:
        """Launch the sum of `tensor`; one that :meth:`allocate` did not return takes a copy there and back."""
        self._outstanding.count += 1
        return _Reduction(self, tensor, note)

    def gather(self, tensor: Tensor, parts: Sequence[Sequence[slice]]) -> Launched:
        """Launch the gathering of each rank's `parts` into `tensor`, which :meth:`allocate` returned, in place.

        A wait for it returns when no rank reads from this one's memory any more.
        """
        return self.post(self.group.launch_gather(tensor, parts))

    def post(self, operation: Any) -> Launched:
        """Count an operation that was launched on :attr:`group`, and return it in the form that :meth:`wait` takes."""
        self.count_launch()
        return _Posted(self.group, operation)

    def progress(self) -> None:
        """Reduce the buckets that every rank has launched."""
        self.group.progress()


class _Reduction:
    """A launched sum in shared memory."""

    def __init__(self, channel: SharedChannel, tensor: Tensor, note: Note | None) -> None:
        self._channel, self._tensor, self._copy = channel, tensor, None
        shared = tensor
        if not channel.group.holds(tensor):  # peers map only the group's own memory
            self._copy = shared = channel.allocate(tensor.numel(), tensor.dtype)
            shared.copy_(tensor.view(-1))
        factor = compute_scale if note is not None else None
        self._operation = channel.group.launch_all_reduce(shared, note, factor)

    def is_completed(self) -> bool:
        """Return whether it is finished."""
        finished: bool = self._operation.finished
        return finished

    def wait(self) -> None:
        """Return when it is finished."""
        self._channel.group.wait_for(self._operation)
        if self._copy is not None:
            self._tensor.view(-1).copy_(self._copy)
            self._channel.free(self._copy)
            self._copy = None


class _Posted:
    """A launched operation in shared memory."""

    def __init__(self, group: Any, operation: Any) -> None:
        self._group, self._operation = group, operation

    def wait(self) -> None:
        """Return when every rank has its result."""
        self._group.wait_for(self._operation)
