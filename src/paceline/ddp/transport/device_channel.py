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
from paceline.comm.shm.operation import Operation
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

    def all_reduce(self, tensor: Tensor) -> Launched:
        """Launch the sum of `tensor` over all ranks, in place."""
        beside = self._channel_of(tensor.device)
        return super().all_reduce(tensor) if beside is None else beside.all_reduce(tensor)

    def reduce_parts(self, flat: Tensor, parts: Sequence[Sequence[slice]]) -> Launched:
        """Launch the sum of `flat`; in the host's memory all of it, which is more than was asked for."""
        beside = self._channel_of(flat.device)
        return super().reduce_parts(flat, parts) if beside is None else beside.all_reduce(flat)

    def broadcast(self, tensors: Sequence[Tensor], source: int = 0) -> None:
        """Make `tensors` equal to those of rank `source`, in place; returns when that is done."""
        super().broadcast([tensor for tensor in tensors if tensor.device.type == self._kind], source)
        self.host.broadcast([tensor for tensor in tensors if tensor.device.type != self._kind], source)


class HostChannel(Channel):
    """Sums through shared memory that each rank computes for itself, from what all others show it.

    So a sum is whole as soon as every rank has launched it, and no one waits for another rank to do its part.
    """

    def all_reduce(self, tensor: Tensor) -> Launched:
        """Launch the sum of `tensor` over all ranks, in place. The others see its present values."""
        self._outstanding.count += 1
        operation: Operation = self.group.launch_own_sum(tensor.view(-1))
        return operation

    def progress(self) -> None:
        """Compute the sums for which every rank has shown its part."""
        self.group.progress()
