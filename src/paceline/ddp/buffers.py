"""The broadcast of buffers during a synchronized backward pass, which makes them equal between steps.

torch DDP broadcasts before each forward pass in training mode. Between its steps, each rank therefore has different
running statistics for BatchNorm, and evaluation results differ by rank. Here, the broadcast runs with the backward pass
that follows the forward pass. The number of broadcasts is the same, and no forward pass waits for another rank.

Decision 0024 says why.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator

import torch
from torch import Tensor

from paceline.core.torch_internals.distributed.dtensor import local_of
from paceline.core.torch_internals.tensors import copy_each, zero_each
from paceline.ddp.consistency.buffers import Buffers
from paceline.ddp.transport.channel import Channel, Launched
from paceline.errors import DesyncError

_ALIGNMENT = 16  # bytes, the size of the largest dtype: views of any dtype may start at multiples of this


class BuffersAtRest:
    """Broadcasts rank 0's `buffers` over the channel, without blocking between launch and wait."""

    def __init__(self, buffers: Buffers, channel: Channel) -> None:
        self._buffers, self._channel = buffers, channel
        # The flat tensors to broadcast, one per device; allocated on first use and when the buffers' shapes or dtypes
        # change.
        self._flats: list[Tensor] = []
        # Grouped by dtype, because a GPU can copy many tensors of one dtype in a single kernel: the indices of the
        # buffers, and for each buffer a view of its part of a flat tensor, in the buffer's shape.
        self._places: dict[torch.dtype, tuple[list[int], list[Tensor]]] = {}
        # The same for tensors marked as conjugate or negative, which torch cannot copy in one kernel.
        self._marked: list[tuple[int, Tensor]] = []
        # The name, shape, dtype and device of each buffer in the flat tensors.
        self._layout: list[tuple[str, torch.Size, torch.dtype, torch.device]] = []
        self._is_new_layout = False
        self._changed: list[tuple[str, torch.Size, torch.dtype, torch.device]] = []
        # During a broadcast: the buffers, and the collectives that send them. Empty otherwise.
        self._tensors: list[Tensor] = []
        self._launched: list[Launched] = []
        self.is_under_way = False

    @torch.no_grad()
    def launch(self) -> None:
        """Launch the broadcast; called by all ranks."""
        # Through .data, so that autograd's version counters stay the same: another backward pass may follow.
        named = self._buffers.named()
        self._tensors = [local_of(buffer.data) for buffer in named.values()]
        pairs = zip(named, self._tensors, strict=True)
        layout = [(name, tensor.shape, tensor.dtype, tensor.device) for name, tensor in pairs]
        if layout != self._layout or not self._flats:
            self._allocate()
            self._changed = [place for place in layout if place not in self._layout]
            self._layout, self._is_new_layout = layout, True
        if self._channel.rank:
            zero_each(self._flats)
        else:
            for tensors, places in self._pairs():
                copy_each(places, tensors)
            for number, place in self._marked:
                place.copy_(self._tensors[number])
        if self._is_new_layout:
            for flat in self._flats:
                flat[self._channel.rank] = self._digest()
        # All ranks except rank 0 contribute zeros to an integer sum, which is exact for every dtype and for NaN. A
        # broadcast over shared memory cannot be launched here and waited for later.
        self._launched = [self._channel.all_reduce(flat) for flat in self._flats]
        self.is_under_way = True

    @torch.no_grad()
    def wait(self) -> None:
        """Wait for the broadcast, and copy its values into the buffers."""
        is_new, self._is_new_layout = self._is_new_layout, False
        try:
            for launched in self._launched:
                self._channel.meet(launched, "broadcast of buffers")
        except DesyncError as error:
            if is_new:  # the layouts of two ranks differ in their number of bytes
                raise self._of_other_forms("another rank", f" ({error})") from error
            raise
        if is_new:
            self._check_same_layout()
        if self._channel.rank != 0:
            for tensors, places in self._pairs():
                copy_each(tensors, places)
            for number, place in self._marked:
                self._tensors[number].copy_(place)
        self._launched, self._tensors = [], []
        self.is_under_way = False

    def _allocate(self) -> None:
        for flat in self._flats:
            self._channel.free(flat)
        # Each flat tensor begins with one layout digest per rank, written by that rank.
        head = -(-4 * self._channel.size // _ALIGNMENT) * _ALIGNMENT
        # Even if all local buffers are still None, because another rank may already have filled one.
        ends: dict[torch.device, int] = {} if self._tensors else {self._buffers.device: head}
        offsets = []
        for tensor in self._tensors:
            start = ends.get(tensor.device, head)
            offsets.append(start)
            size = tensor.numel() * tensor.element_size()
            ends[tensor.device] = -(-(start + size) // _ALIGNMENT) * _ALIGNMENT
        # In units of int32, which every backend can sum; all ends are multiples of its size.
        flats = {device: self._channel.allocate(end // 4, torch.int32, device) for device, end in ends.items()}
        self._flats = list(flats.values())
        self._places, self._marked = {}, []
        for number, (tensor, offset) in enumerate(zip(self._tensors, offsets, strict=True)):
            size = tensor.numel() * tensor.element_size()
            if not size:
                continue
            part = flats[tensor.device].view(torch.uint8)[offset : offset + size]
            place = part.view(tensor.dtype).view(tensor.shape)
            if tensor.is_conj() or tensor.is_neg():
                self._marked.append((number, place))
                continue
            numbers, places = self._places.setdefault(tensor.dtype, ([], []))
            numbers.append(number)
            places.append(place)

    def _pairs(self) -> Iterator[tuple[list[Tensor], list[Tensor]]]:
        for numbers, places in self._places.values():
            yield [self._tensors[number] for number in numbers], places

    def _digest(self) -> int:
        """Return a 31-bit digest of the buffers' names, shapes and dtypes; device numbers may differ between ranks."""
        forms = [(name, tuple(shape), str(dtype), device.type) for name, shape, dtype, device in self._layout]
        return zlib.crc32(repr(forms).encode()) >> 1

    def _check_same_layout(self) -> None:
        """Compare the ranks' layouts, which are sent with the first broadcast of this rank's layout."""
        own_digest = self._digest()
        for flat in self._flats:
            for rank, digest in enumerate(flat[: self._channel.size].tolist()):
                if digest != own_digest:
                    raise self._of_other_forms(f"rank {self._channel.members[rank]}")

    def _of_other_forms(self, others: str, reason: str = "") -> DesyncError:
        """Return the error for buffers whose shape or dtype differs from the buffers of `others`."""
        forms = [f"{name} {list(shape)}" for name, shape, *_ in self._changed]
        some = ", ".join(forms[:5]) + ", …" * (len(forms) > 5) or "all None"
        return DesyncError(
            f"rank {self._channel.members[self._channel.rank]}: its new buffers are {some}, but {others} has different "
            f"ones{reason}; use the same shapes on all ranks in each step, or register caches with persistent=False"
        )
