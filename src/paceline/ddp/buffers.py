"""Buffers: which ones are synchronized, and the broadcasts that keep them equal on all ranks.

torch DDP broadcasts before each forward pass in training mode. Between its steps, each rank therefore has different
running statistics for BatchNorm, and evaluation results differ by rank. Here, the broadcast runs with the backward pass
that follows the forward pass. The number of broadcasts is the same, and no forward pass waits for another rank.

Decision 0024 says why.
"""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Iterator
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

from paceline.core.torch_distributed import local_of
from paceline.core.torch_internals import class_never_compiled, copy_each, zero_each
from paceline.ddp.channel import Channel, Launched
from paceline.ddp.joined_steps import Event, JoinEvents
from paceline.ddp.ledger import Ledger
from paceline.errors import DesyncError


class Buffers:
    """Finds the buffers of `module` by name, except the `ignored` ones; the model's gradients are on `device`."""

    def __init__(self, module: nn.Module, ignored: set[str], device: torch.device) -> None:
        self.device = device
        # Modules and names instead of tensors, because a module may assign a new tensor to a buffer (pytorch issue
        # 63916).
        self.places: list[tuple[str, nn.Module, str]] = []
        self._ignored = ignored
        # Modules whose buffers are known; buffers that they register later stay local.
        self._parts: WeakSet[nn.Module] = WeakSet()
        self.renew(module)

    def renew(self, module: nn.Module) -> None:
        """Add the buffers of new submodules of `module`, and drop the buffers of removed ones.

        A persistent buffer that is still None, such as a codebook filled by the first batch, is also added, and is
        synchronized once it is a tensor. A buffer that is registered later, or that is None and not persistent, stays
        local: it is usually a cache, and its size may differ between ranks.
        """
        previous = {(id(part), name) for _, part, name in self.places}
        known_parts, self.places = self._parts, []
        self._parts = WeakSet(module.modules())
        visited: set[int] = set()
        for prefix, part in module.named_modules():
            for name, buffer in part._buffers.items():
                full = f"{prefix}.{name}" if prefix else name
                # Norm layers without statistics keep these buffer names with the value None.
                is_left_out = name in part._non_persistent_buffers_set or not getattr(part, "track_running_stats", True)
                if (buffer is None and is_left_out) or full in self._ignored or id(buffer) in visited:
                    continue
                if buffer is not None:
                    visited.add(id(buffer))  # broadcast only once if two modules share it
                if part not in known_parts or (id(part), name) in previous:
                    self.places.append((full, part, name))

    def are_broadcast_by(self, wrapper: Any) -> bool:
        """Return whether forward passes of `wrapper` in training mode synchronize buffers."""
        return wrapper.require_forward_param_sync and wrapper.forward_sync_buffers and bool(self.places)

    def named(self) -> dict[str, Tensor]:
        """Return the current tensors, by name."""
        pairs = ((full, part._buffers.get(name)) for full, part, name in self.places)
        return {full: buffer for full, buffer in pairs if buffer is not None}


_ALIGNMENT = 16  # bytes, the size of the largest dtype: views of any dtype may start at multiples of this


class BuffersAtRest:
    """Broadcasts rank 0's `buffers` over the channel, without blocking between launch and wait."""

    def __init__(self, buffers: Buffers, channel: Channel) -> None:
        self._buffers, self._channel = buffers, channel
        # The flat tensors to broadcast, one per device; allocated on first use and when the buffers' shapes or dtypes
        # change.
        self._flats: list[Tensor] = []
        # For each dtype: the buffers' indices and their views into one flat tensor, so that a GPU copies them in one
        # kernel.
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


@class_never_compiled
class BufferSync:
    """Synchronizes the buffers of one wrapper that has peers.

    Buffers are broadcast with the synchronized backward pass that follows a counted forward pass. If they may differ
    when a step begins, they are also broadcast before its first counted forward pass. Inside ``join``, every broadcast
    is announced to the ranks without data, and runs before that forward.

    Args:
        wrapper: its torch attributes determine whether forward passes synchronize buffers. Referenced weakly.
        buffers: the module's buffers.
        channel: connects all ranks.
        join_events: announces each broadcast to ranks without data.
        ledger: counts forward passes, for comparison with other ranks.
        may_differ: whether the buffers may differ between ranks at first.
    """

    _may_differ: bool
    """Whether there was a counted forward pass since the buffers were last equal. When a step begins, the value is the
    same on every rank. Passes under ``no_sync`` do not count."""
    is_sliced = False
    """Whether forward passes belong to slices of virtual ranks, each with its own buffers."""

    def __init__(
        self,
        wrapper: nn.Module,
        buffers: Buffers,
        channel: Channel,
        join_events: JoinEvents,
        ledger: Ledger,
        *,
        may_differ: bool,
    ) -> None:
        self._may_differ = may_differ
        self.buffers, self._channel, self._at_rest = buffers, channel, BuffersAtRest(buffers, channel)
        self._join_events, self._ledger, self._wrapper = join_events, ledger, weakref.ref(wrapper)

    # -- with a forward -----------------------------------------------------------------------------------------

    @property
    def is_wanted(self) -> bool:
        """Whether forward passes in training mode currently synchronize buffers."""
        wrapper = self._wrapper()
        return wrapper is not None and self.buffers.are_broadcast_by(wrapper)

    def begin_step(self) -> None:
        """Make the buffers equal unless they already are; called on all ranks before a forward pass or sliced step."""
        if self._may_differ:
            self.synchronize()

    def restored(self) -> None:
        """Record that the buffers have been reset to their values before the step, which are equal on all ranks."""
        self._may_differ = False

    def forward_begins(self) -> bool:
        """Count a forward pass, and return whether it synchronizes buffers.

        If so, and if it is the first one of its step, first make the buffers equal unless they already are.
        """
        travels, ledger = bool(self.buffers.places) and self.is_wanted, self._ledger
        # Not before later forward passes of the step, because a rank without data does not know their number.
        broadcasts = travels and ledger.forwards_since_sync == 0
        ledger.status.forwards += broadcasts  # the number of passes with broadcasts must be equal on all ranks
        ledger.forwards_since_sync += 1
        if broadcasts and not self.is_sliced:  # otherwise, rank 0 may be working on another slice
            self.begin_step()
        self._may_differ = True
        return travels

    def synchronize(self) -> bool:
        """Make the buffers equal now; returns whether there are any to synchronize."""
        if not self.is_wanted:
            return False
        if self._join_events.enabled:
            self._join_events.announce(Event.BUFFERS)
        self.exchange()
        self._may_differ = False
        return True

    # -- with a backward ----------------------------------------------------------------------------------------

    def launch(self) -> None:
        """Launch the broadcast at the end of a synchronized backward pass, if any forward pass was counted before it.

        All ranks make the same decision.
        """
        # Inside join(), a separate broadcast is announced before the next step's first forward pass.
        if not self.buffers.places or self._join_events.enabled:
            return
        if self._may_differ and self.is_wanted:
            self._may_differ = False
            self._at_rest.launch()

    def wait(self) -> None:
        """Wait for the broadcast, if one was launched, and copy its values into the buffers."""
        if self._at_rest.is_under_way:
            self._at_rest.wait()

    # -- inside join --------------------------------------------------------------------------------------------

    def exchange(self) -> None:
        """Copy the buffers of the first rank that has data to all ranks; collective."""
        # Through .data, so that autograd's version counters do not change: two forwards may precede a backward pass.
        tensors = [local_of(buffer.data) for buffer in self.buffers.named().values()]
        self._channel.broadcast(tensors, self._join_events.source)

    def taken_along(self) -> list[Tensor]:
        """Return the buffers for the broadcast at the end of ``join``, and count them as equal."""
        self._may_differ = False
        return [buffer.data for buffer in self.buffers.named().values()]
