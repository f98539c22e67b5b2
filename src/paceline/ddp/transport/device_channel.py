"""Channels of a wrapper whose gradients are on GPUs: one for these, and one beside it for what hosts tell each other.

The control block is host data. NCCL does not carry it, and a copy to the GPU and back would wait for all work there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.comm.registered_memory import RegisteredMemory
from paceline.comm.shm.header import Note
from paceline.ddp.transport.channel import Channel, Launched


class DeviceChannel(Channel):
    """A channel for tensors on one kind of device, which leaves those in the host's memory to :attr:`host`."""

    def __init__(
        self, group: dist.ProcessGroup, own: Any, device: torch.device, memory: RegisteredMemory | None = None
    ) -> None:
        super().__init__(group, own, memory)
        self._kind = device.type

    def _channel_of(self, device: torch.device | str) -> Channel | None:
        """The channel beside this one, if tensors on `device` are its."""
        return None if torch.device(device).type == self._kind else self.host

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device | str = "cpu") -> Tensor:
        """A zeroed flat tensor that reductions take best."""
        beside = self._channel_of(device)
        return super().allocate(numel, dtype, device) if beside is None else beside.allocate(numel, dtype, device)

    def free(self, tensor: Tensor) -> None:
        """Give back what :meth:`allocate` gave."""
        if (beside := self._channel_of(tensor.device)) is not None:
            beside.free(tensor)

    def all_reduce(self, tensor: Tensor, note: Note | None = None) -> Launched:
        """Launch the sum of `tensor` over all ranks, in place."""
        beside = self._channel_of(tensor.device)
        return super().all_reduce(tensor, note) if beside is None else beside.all_reduce(tensor)

    def reduce_parts(self, flat: Tensor, parts: Sequence[Sequence[slice]], note: Note | None = None) -> Launched:
        """Launch the sum of `flat`; in the host's memory all of it, which is more than was asked for."""
        beside = self._channel_of(flat.device)
        return super().reduce_parts(flat, parts, note) if beside is None else beside.all_reduce(flat)

    def broadcast(self, tensors: Sequence[Tensor], source: int = 0) -> None:
        """Make `tensors` equal to those of rank `source`, in place; returns when that is done."""
        super().broadcast([tensor for tensor in tensors if tensor.device.type == self._kind], source)
        self.host.broadcast([tensor for tensor in tensors if tensor.device.type != self._kind], source)


class HostChannel(Channel):
    """Sums through shared memory that each rank computes for itself, from what all others show it.

    So a sum is whole as soon as every rank has launched it, and no one waits for another rank to do its part.
    """

    def __init__(self, group: dist.ProcessGroup, own: Any) -> None:
        super().__init__(group, own)
        # What this rank shows, with the operation that reads it. It is written to again when that is finished.
        self._shown: list[tuple[Tensor, Any]] = []

    def all_reduce(self, tensor: Tensor, note: Note | None = None) -> Launched:
        """Launch the sum of `tensor` over all ranks, in place. The others see its present values."""
        flat = tensor.view(-1)
        shown = self._place_for(flat)
        shown.copy_(flat)
        operation = self.group.launch_own_sum(shown, flat)
        self._shown.append((shown, operation))
        self._outstanding.count += 1
        return _OwnSum(self.group, operation)

    def _place_for(self, flat: Tensor) -> Tensor:
        """Memory of the size of `flat` that no one reads any more."""
        found: Tensor | None = None
        still_read = []
        for shown, operation in self._shown:
            if not operation.finished:
                still_read.append((shown, operation))
            elif found is None and (shown.shape, shown.dtype) == (flat.shape, flat.dtype):
                found = shown
            else:
                self.group.free(shown)
        self._shown = still_read
        if found is None:
            found = self.group.allocate(flat.numel(), flat.dtype)
        return found

    def progress(self) -> None:
        """Compute the sums for which every rank has shown its part."""
        self.group.progress()


class _OwnSum:
    """A launched sum of a :class:`HostChannel`."""

    def __init__(self, group: Any, operation: Any) -> None:
        self._group, self._operation = group, operation

    def is_completed(self) -> bool:
        """Whether the sum is there."""
        computed: bool = self._operation.computed
        return computed

    def wait(self) -> None:
        """Return when the sum is there."""
        self._group.wait_for_own(self._operation)
