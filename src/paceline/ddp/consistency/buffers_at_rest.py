"""Buffers that are equal on all ranks between steps: rank 0's travel at the end of each synchronized backward.

torch DDP broadcasts before each training forward, so between steps BatchNorm's running statistics are each rank's own,
and an evaluation differs by rank. Here each counted forward has its broadcast after it: with the backward that follows,
or before a further forward. There are as many, and none waits for a rank before its forward.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from paceline.ddp.consistency.buffers import Buffers
from paceline.ddp.transport.channel import Channel, Launched
from paceline.torch_internals.dtensor import local_of

_ALIGNMENT = 16  # bytes; every dtype may begin there


class BuffersAtRest:
    """Makes `buffers` equal to those of the channel's rank 0.

    Args:
        buffers: of the module.
        channel: where they travel.
        is_wanted: whether buffers are synchronized, and by no hook of the user's.
        may_differ: whether they may differ between ranks now.
    """

    forwards: int
    """Counted forwards since buffers were equal, the same number on every rank. Forwards under ``no_sync`` do not
    count, as ranks may run different numbers of them."""

    def __init__(self, buffers: Buffers, channel: Channel, is_wanted: Callable[[], bool], *, may_differ: bool) -> None:
        self.forwards = int(may_differ)
        self._buffers, self._channel, self._is_wanted = buffers, channel, is_wanted
        # By device: the tensor that travels, and where in it each buffer lies. Made when first needed.
        self._flats: list[Tensor] = []
        self._places: list[Tensor] = []
        self._layout: list[tuple[torch.Size, torch.dtype, torch.device]] = []
        # Under way: the buffers, and what was launched for them.
        self._tensors: list[Tensor] = []
        self._launched: list[Launched] = []

    def named(self) -> dict[str, Tensor]:
        """The buffers as of now."""
        return self._buffers.named()

    @torch.no_grad()
    def launch(self) -> None:
        """Launch the broadcast, if forwards have run; the same on all ranks."""
        if not self.forwards or not self._is_wanted():
            return
        self.forwards = 0
        # Through .data, so that autograd's version counters do not see it: another backward may follow.
        self._tensors = [local_of(buffer.data) for buffer in self._buffers.named().values()]
        layout = [(tensor.shape, tensor.dtype, tensor.device) for tensor in self._tensors]
        if layout != self._layout:
            self._allocate()
            self._layout = layout
        if self._channel.rank == 0:
            torch._foreach_copy_(self._places, self._tensors)
        else:
            torch._foreach_zero_(self._flats)
        # As a sum of whole numbers to which only rank 0 contributes: exact, whatever the dtype.
        self._launched = [self._channel.all_reduce(flat) for flat in self._flats]

    @torch.no_grad()
    def settle(self) -> bool:
        """Wait for what was launched, and take it over; returns whether there was anything."""
        travelled = bool(self._launched)
        for launched in self._launched:
            self._channel.wait(launched, "broadcast of buffers")
        if travelled and self._channel.rank != 0:
            torch._foreach_copy_(self._tensors, self._places)
        self._launched, self._tensors = [], []
        return travelled

    def _allocate(self) -> None:
        for flat in self._flats:
            self._channel.free(flat)
        ends: dict[torch.device, int] = {}
        offsets = []
        for tensor in self._tensors:
            start = ends.get(tensor.device, 0)
            offsets.append(start)
            size = tensor.numel() * tensor.element_size()
            ends[tensor.device] = -(-(start + size) // _ALIGNMENT) * _ALIGNMENT
        flats = {device: self._channel.allocate(end // 4, torch.int32, device) for device, end in ends.items() if end}
        self._flats = list(flats.values())
        self._places = []
        for tensor, offset in zip(self._tensors, offsets, strict=True):
            size = tensor.numel() * tensor.element_size()
            if not size:
                self._places.append(torch.empty_like(tensor))
                continue
            part = flats[tensor.device].view(torch.uint8)[offset : offset + size]
            self._places.append(part.view(tensor.dtype).view(tensor.shape))
