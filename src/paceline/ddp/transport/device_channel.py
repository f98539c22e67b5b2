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
from paceline.comm.shm.header import Note
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

    def all_reduce(self, tensor: Tensor, note: Note | None = None) -> Launched:
        """Launch the sum of `tensor` over all ranks, in place."""
        carrier = self.carrier_of(tensor.device)
        return super().all_reduce(tensor, note) if carrier is self else carrier.all_reduce(tensor)

    def broadcast(self, tensors: Sequence[Tensor], source: int = 0) -> None:
        """Make `tensors` equal to those of rank `source`, in place; returns when that is done."""
        super().broadcast([tensor for tensor in tensors if tensor.device.type == self._kind], source)
        self.host.broadcast([tensor for tensor in tensors if tensor.device.type != self._kind], source)


class HostChannel(Channel):
    """Sums through shared memory that each rank computes for itself, from the values that all others show it.

    So a sum is whole as soon as every rank has launched it, and no rank waits for another to do its part.
    """

    def __init__(self, group: dist.ProcessGroup, own: Any) -> None:
        super().__init__(group, own)
        # Tensors that this rank shows, each with the operation that reads it; used again when that is finished.
        self._shown: list[tuple[Tensor, Any]] = []

    def all_reduce(self, tensor: Tensor, note: Note | None = None) -> Launched:
        """Launch the sum of `tensor` over all ranks, in place. The others see its present values."""
        flat = tensor.view(-1)
        # A copy, because the sum is written into `tensor` while slower ranks still read this one's values.
        shown = self._place_for(flat)
        shown.copy_(flat)
        operation = self.group.launch_own_sum(shown, flat)
        self._shown.append((shown, operation))
        self._outstanding.count += 1
        return _OwnSum(self.group, operation)

    def _place_for(self, flat: Tensor) -> Tensor:
        """Return shared memory of the size of `flat` that no rank reads any more."""
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
        """Return whether the sum is there."""
        computed: bool = self._operation.computed
        return computed

    def wait(self) -> None:
        """Return when the sum is there."""
        self._group.wait_for_own(self._operation)
