"""The broadcast of buffers that travels with a synchronized backward, so that they are equal between steps.

torch DDP broadcasts before each training forward, so between steps BatchNorm's running statistics are each rank's own,
and an evaluation differs by rank. Here the broadcast of a forward comes with the backward that follows it. There are as
many broadcasts, and no forward waits for a rank.

Decision 0024 says why.
"""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.core.torch_internals.distributed.dtensor import local_of
from paceline.core.torch_internals.tensors import copy_each, zero_each
from paceline.ddp.consistency.buffers import Buffers
from paceline.ddp.transport.channel import Channel, Launched

_ALIGNMENT = 16  # bytes: the size of the largest dtype, so a view in any dtype may begin at a multiple


class BuffersAtRest:
    """Makes `buffers` equal to those of the channel's rank 0, without blocking in between."""

    def __init__(self, buffers: Buffers, channel: Channel) -> None:
        self._buffers, self._channel = buffers, channel
        # The flat tensors that travel, one for each device; made when first needed, and when buffers change their form.
        self._flats: list[Tensor] = []
        # For each buffer, a view of its part of a flat tensor, in its own dtype and shape.
        self._places: list[Tensor] = []
        # The form of each buffer for which the flat tensors were made.
        self._layout: list[tuple[torch.Size, torch.dtype, torch.device]] = []
        # While a broadcast is under way: the buffers, and the collectives that carry them. Otherwise empty.
        self._tensors: list[Tensor] = []
        self._launched: list[Launched] = []
        self.is_under_way = False

    @torch.no_grad()
    def launch(self) -> None:
        """Launch the broadcast; the same on all ranks."""
        # Through .data, which leaves autograd's version counters alone: another backward may follow.
        self._tensors = [local_of(buffer.data) for buffer in self._buffers.named().values()]
        layout = [(tensor.shape, tensor.dtype, tensor.device) for tensor in self._tensors]
        if layout != self._layout:
            self._allocate()
            self._layout = layout
        if not self._flats:  # all are empty
            pass
        elif self._channel.rank == 0:
            copy_each(self._places, self._tensors)
        else:
            zero_each(self._flats)
        # As a sum of whole numbers to which only rank 0 contributes: exact for every dtype, NaN included. Shared memory
        # has no broadcast that is launched here and waited for later.
        self._launched = [self._channel.all_reduce(flat) for flat in self._flats]
        self.is_under_way = True

    @torch.no_grad()
    def wait(self) -> None:
        """Wait for the broadcast, and copy its values into the buffers."""
        for launched in self._launched:
            self._channel.meet(launched, "broadcast of buffers")
        if self._launched and self._channel.rank != 0:
            copy_each(self._tensors, self._places)
        self._launched, self._tensors = [], []
        self.is_under_way = False

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
        # In units of int32, which every backend sums; the ends are multiples of it.
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
