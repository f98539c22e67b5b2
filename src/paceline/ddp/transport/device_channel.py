"""Channels of a wrapper whose gradients are on GPUs: one for these, and one beside it for reports between the hosts.

The control block is host data. NCCL does not carry it, and a copy to the GPU and back would wait for all work there.

Decision 0025 says why.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.comm.registered_memory import RegisteredMemory
from paceline.ddp.transport.channel import Channel, Launched


class DeviceChannel(Channel):
    """A channel for tensors on one kind of device; :attr:`host` carries those in the host's memory."""

    def __init__(
        self, group: dist.ProcessGroup, own: Any, device: torch.device, memory: RegisteredMemory | None = None
    ) -> None:
        super().__init__(group, own, memory)
        self._kind = device.type

    def carrier_of(self, device: torch.device | str) -> Channel:
        """Return this channel for its own kind of device, and :attr:`host` for any other."""
        return self if torch.device(device).type == self._kind else self.host

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device | str = "cpu") -> Tensor:
        """Allocate a zeroed flat tensor where the channel that carries it uses it without a copy."""
        carrier = self.carrier_of(device)
        return super().allocate(numel, dtype, device) if carrier is self else carrier.allocate(numel, dtype, device)

    def free(self, tensor: Tensor) -> None:
        """Free a tensor that :meth:`allocate` returned."""
        if (carrier := self.carrier_of(tensor.device)) is not self:
            carrier.free(tensor)

    def all_reduce(self, tensor: Tensor) -> Launched:
        """Launch the sum of `tensor` over all ranks, in place."""
        # Without carrier_of(): to make an object of the device costs a tenth of a launch, which there are many of.
        return self.host.all_reduce(tensor) if tensor.is_cpu else Channel.all_reduce(self, tensor)

    def broadcast(self, tensors: Sequence[Tensor], source: int = 0) -> None:
        """Make `tensors` equal to those of rank `source`, in place; returns when that is done."""
        super().broadcast([tensor for tensor in tensors if tensor.device.type == self._kind], source)
        self.host.broadcast([tensor for tensor in tensors if tensor.device.type != self._kind], source)


class HostChannel(Channel):
    """Sums through shared memory that each rank computes for itself, from the values that all others show it.

    So a sum is whole as soon as every rank has launched it, and no rank waits for another to do its part.
    """

    def all_reduce(self, tensor: Tensor) -> Launched:
        """Launch the sum of `tensor` over all ranks, in place. The others see its present values."""
        self.count_launch()
        return self.group.launch_own_sum(tensor.view(-1))  # type: ignore[no-any-return]

    def progress(self) -> None:
        """Compute the sums for which every rank has shown its part."""
        self.group.progress()
