"""Segments: neighbouring parameters whose new values are gathered together from the ranks that own pieces of them.

Among ranks that share memory, parameters move into it, and each rank reads the others' updates where they lie.
Elsewhere the parameters stay where they are, and pieces go through a buffer of the segment's size.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from paceline.core.state.buckets import flattened, joined, shaped_like
from paceline.core.torch_internals.tensors import copy_each
from paceline.ddp.transport.channel import Channel, Launched
from paceline.ddp.transport.shared_channel import SharedChannel
from paceline.errors import UsageError
from paceline.optim.sharding_plan import Piece

ALIGN = 64
"""Elements at whose multiples parameters begin in shared memory, so that each is aligned to 64 bytes or more in any
dtype, as torch's allocator aligns it: matrix kernels of CPUs round by the alignment of their operands."""

STAGED = 4
"""Segments that travel through buffers of their own at a time: enough to keep a network busy, and few enough that the
buffers together stay small beside the parameters."""


class Segment(Protocol):
    """Parameters of one dtype on one device, with the pieces that ranks own of them."""

    parameters: list[nn.Parameter]
    most_launched: int | None
    """Number of such segments that are launched before the first is waited for; None for all of them, if they need no
    further memory."""

    def take(self) -> None:
        """Follow the parameters to the memory that they have now."""

    def launch(self) -> Launched:
        """Launch the gathering of the other ranks' parts of the parameters; all ranks call this."""


def flat_view(parameter: nn.Parameter) -> Tensor:
    """Return a view of the elements of a dense `parameter`, in one dimension and the order of its memory."""
    return flattened(parameter.detach())


class SharedSegment:
    """A segment in the memory that the ranks of a host share."""

    most_launched: int | None = None

    def __init__(self, channel: SharedChannel, parameters: Sequence[nn.Parameter], pieces: Sequence[Piece]) -> None:
        self.parameters = list(parameters)
        self._channel = channel
        *self._offsets, self._total = aligned_offsets([parameter.numel() for parameter in parameters])
        self._flat = channel.allocate(self._total, parameters[0].dtype)
        self._storages: list[StorageWeakRef] = []
        """Storages of the parameters, each over its part of :attr:`_flat`."""
        self._left: list[tuple[Tensor, list[StorageWeakRef]]] = []
        """Shared memory that the parameters have left, and the storages over it that may still be in use."""
        self._parts = _parts(parameters, pieces, channel.size, [*self._offsets, self._total])
        self.take()

    @torch.no_grad()
    def take(self) -> None:
        """Move the parameters into the shared memory, one by one."""
        check_one_dtype(self.parameters)
        self._leave()
        for offset, parameter in zip(self._offsets, self.parameters, strict=True):
            if size := parameter.numel():
                # In a storage of its own, because torch.save writes the whole storage of a tensor.
                raw = torch.utils.dlpack.from_dlpack(self._flat[offset : offset + size].view(torch.uint8))
                place = shaped_like(parameter, raw.view(parameter.dtype))
                if place.data_ptr() != parameter.data_ptr():
                    parameter.data = place.copy_(parameter)
        self._storages = [StorageWeakRef(parameter.untyped_storage()) for parameter in self.parameters]

    def _leave(self) -> None:
        """Take other memory if someone else holds a parameter's, for example when averaged weights are swapped in."""
        # The old storages live, though parameters have others: somebody will put them back, as after an evaluation.
        pairs = zip(self.parameters, self._storages, strict=False)
        is_held = any(not had.expired() and each.untyped_storage()._cdata != had.cdata for each, had in pairs)
        if is_held or self._flat.dtype is not self.parameters[0].dtype:
            self._left.append((self._flat, self._storages))
            self._flat = self._channel.allocate(self._total, self.parameters[0].dtype)
        left, self._left = self._left, []
        for flat, storages in left:
            if all(had.expired() for had in storages):
                self._channel.free(flat)
            else:
                self._left.append((flat, storages))

    def launch(self) -> Launched:
        """Launch the reading of the others' parts."""
        return self._channel.gather(self._flat, self._parts)


class StagedSegment:
    """A segment that travels through the backend's all-gather."""

    most_launched: int | None = STAGED

    def __init__(self, channel: Channel, parameters: Sequence[nn.Parameter], pieces: Sequence[Piece]) -> None:
        self.parameters = list(parameters)
        self._channel, self._pieces = channel, _by_owner(pieces, channel.size)
        self._row = max(sum(piece.numel for piece in owned) for owned in self._pieces)  # an all-gather has equal shards
        self._places: list[list[tuple[Tensor, slice]]] = []
        self.take()

    @torch.no_grad()
    def take(self) -> None:
        """Find the pieces in the parameters' memory."""
        check_one_dtype(self.parameters)
        for parameter in self.parameters:
            check_dense(parameter)
        views = [flat_view(parameter) for parameter in self.parameters]
        self._places = []
        for owned in self._pieces:
            offset, places = 0, []
            for piece in owned:
                view = views[piece.parameter][piece.start : piece.stop]
                places.append((view, slice(offset, offset + piece.numel)))
                offset += piece.numel
            self._places.append(places)

    def launch(self) -> Launched:
        """Copy this rank's pieces into a buffer, and launch its all-gather."""
        first = self.parameters[0]
        # A new buffer each time, which lives until the gathering has ended, and not between steps.
        flat = torch.empty(self._channel.size * self._row, dtype=first.dtype, device=first.device)
        rows = list(flat.view(self._channel.size, self._row)) if self._row else []
        _copy([(rows[self._channel.rank][part], view) for view, part in self._places[self._channel.rank]])
        return _Staged(self._channel.all_gather(flat), self._channel.rank, rows, self._places)


class _Staged:
    """A launched all-gather, after which the other ranks' pieces are copied into the parameters."""

    def __init__(
        self, launched: Launched, rank: int, rows: list[Tensor], places: list[list[tuple[Tensor, slice]]]
    ) -> None:
        self._launched, self._rank, self._rows, self._places = launched, rank, rows, places

    def wait(self) -> None:
        """Return when the parameters are whole, or will be for all later work of the device."""
        self._launched.wait()
        for owner, (row, places) in enumerate(zip(self._rows, self._places, strict=True)):
            if owner != self._rank:
                _copy([(view, row[part]) for view, part in places])


def _copy(pairs: list[tuple[Tensor, Tensor]]) -> None:
    if pairs:
        with torch.no_grad():
            copy_each([target for target, _ in pairs], [source for _, source in pairs])


def make_segment(channel: Channel, parameters: Sequence[nn.Parameter], pieces: Sequence[Piece]) -> Segment:
    """Return a segment; all ranks call this. Pieces number their parameters by the order in `parameters`."""
    if isinstance(channel, SharedChannel):
        return SharedSegment(channel, parameters, pieces)
    return StagedSegment(channel, parameters, pieces)


def check_dense(parameter: nn.Parameter) -> None:
    """Lay a parameter out in other memory if it has gaps, or if several of its elements share memory."""
    expected = 1
    for stride, extent in sorted(zip(parameter.stride(), parameter.shape, strict=True)):
        if extent != 1 and stride != expected:
            parameter.data = parameter.data.contiguous()
            return
        expected *= extent


def check_one_dtype(parameters: Sequence[nn.Parameter]) -> None:
    """Refuse parameters of several dtypes, which cannot be gathered together: some were changed since.

    Raises:
        UsageError: names the dtypes.
    """
    dtypes = sorted({str(parameter.dtype) for parameter in parameters})
    if len(dtypes) > 1:
        raise UsageError(
            f"parameters that had one dtype when the ShardedOptimizer was made have {' and '.join(dtypes)} now; change "
            "dtypes before it is made"
        )


def _by_owner(pieces: Sequence[Piece], ranks: int) -> list[list[Piece]]:
    return [[piece for piece in pieces if piece.owner == owner] for owner in range(ranks)]


def aligned_offsets(sizes: Sequence[int]) -> list[int]:
    """Return where parameters of `sizes` elements begin in shared memory, and the length of all of it."""
    return [0, *accumulate(-(-size // ALIGN) * ALIGN for size in sizes)]


def _parts(
    parameters: Sequence[nn.Parameter], pieces: Sequence[Piece], ranks: int, offsets: Sequence[int]
) -> list[list[slice]]:
    """Return the elements of the segment that each rank owns, in as few slices as possible."""

    def place(piece: Piece) -> tuple[int, int]:
        # The owner of a parameter's end owns the gap behind it, too, so that its slices join.
        is_last = piece.stop == parameters[piece.parameter].numel()
        start = offsets[piece.parameter]
        return start + piece.start, offsets[piece.parameter + 1] if is_last else start + piece.stop

    return [[slice(start, stop) for start, stop in joined(sorted(map(place, own)))] for own in _by_owner(pieces, ranks)]
