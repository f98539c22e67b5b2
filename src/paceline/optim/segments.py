"""Segments: neighboring parameters whose updated pieces are gathered together, each from the rank that owns it.

Each rank copies its pieces into a buffer. Ranks that share memory read each other's buffers; other ranks use the
backend's all-gather. Parameters keep their memory, so tensors that alias it stay valid.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from paceline.core.state.flat_views import flattened
from paceline.core.torch_internals.tensors import copy_each, count_uses
from paceline.ddp.transport.channel import Channel, Launched
from paceline.ddp.transport.shared_channel import SharedChannel
from paceline.errors import UsageError
from paceline.optim.sharding_plan import Piece

STAGED = 4
"""Number of segments that are gathered at the same time: enough to keep a network busy, with small buffers."""


def flat_view(parameter: nn.Parameter) -> Tensor:
    """Return a one-dimensional view of the elements of a dense `parameter`, in memory order.

    Writes to it do not raise the parameter's version counter, because parameters without a gradient are gathered with
    their neighbors, and autograd may still need them.
    """
    return flattened(parameter.data)


class Segment:
    """Parameters of one dtype on one device, and the pieces that each rank owns.

    The pieces refer to a parameter by its index in `parameters`.
    """

    def __init__(self, channel: Channel, parameters: Sequence[nn.Parameter], pieces: Sequence[Piece]) -> None:
        self.parameters = list(parameters)
        self._channel = channel
        self._pieces = [[piece for piece in pieces if piece.owner == owner] for owner in range(channel.size)]
        self._row = max(sum(piece.numel for piece in owned) for owned in self._pieces)  # an all-gather has equal shards
        self._places: list[list[tuple[Tensor, slice]]] = []
        """For each rank, its pieces as views of the parameters, and their positions in the rank's buffer."""
        self.find_pieces()

    def find_pieces(self) -> None:
        """Find the pieces in the parameters' current memory."""
        dtypes = sorted({str(parameter.dtype) for parameter in self.parameters})
        if len(dtypes) > 1:
            raise UsageError(
                "parameters that had the same dtype when the ShardedOptimizer was created now have "
                f"{' and '.join(dtypes)}; change dtypes before you create it"
            )
        views = [flat_view(parameter) for parameter in self.parameters]
        self._places = []
        for owned in self._pieces:
            offset, places = 0, []
            for piece in owned:
                view = views[piece.parameter][piece.start : piece.stop]
                places.append((view, slice(offset, offset + piece.numel)))
                offset += piece.numel
            self._places.append(places)

    def launch(self, buffers: Buffers, number: int) -> Launched:
        """Start gathering the other ranks' pieces through buffer `number`. All ranks call this."""
        rank, first = self._channel.rank, self.parameters[0]
        if isinstance(self._channel, SharedChannel):
            row = buffers.get(number, self._row, first.dtype)
            _copy([(row[part], view) for view, part in self._places[rank]])
            return self._channel.gather(row, self._places)
        # Allocate a new buffer each time, which is freed after the all-gather instead of being kept between steps.
        flat = torch.empty(self._channel.size * self._row, dtype=first.dtype, device=first.device)
        rows = list(flat.view(self._channel.size, self._row)) if self._row else []
        _copy([(rows[rank][part], view) for view, part in self._places[rank]])
        return _Staged(self._channel.all_gather(flat), rank, rows, self._places)


class Buffers:
    """Buffers in shared memory, kept between steps because allocating new pages is expensive."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._held = [torch.empty(0, dtype=torch.uint8, device="cpu")] * STAGED

    def get(self, number: int, numel: int, dtype: torch.dtype) -> Tensor:
        """Return buffer `number`, with `numel` elements."""
        size = numel * dtype.itemsize
        if self._held[number].numel() < size:
            self._channel.free(self._held[number])
            self._held[number] = self._channel.allocate(size, torch.uint8)
        return self._held[number][:size].view(dtype)


class _Staged:
    """A launched all-gather. wait() copies the other ranks' pieces into the parameters."""

    def __init__(
        self, launched: Launched, rank: int, rows: list[Tensor], places: list[list[tuple[Tensor, slice]]]
    ) -> None:
        self._launched, self._rank, self._rows, self._places = launched, rank, rows, places

    def wait(self) -> None:
        self._launched.wait()
        for owner, (row, places) in enumerate(zip(self._rows, self._places, strict=True)):
            if owner != self._rank:
                _copy([(view, row[part]) for view, part in places])


def _copy(pairs: list[tuple[Tensor, Tensor]]) -> None:
    if pairs:
        with torch.no_grad():
            copy_each([target for target, _ in pairs], [source for _, source in pairs])


def make_dense(parameter: nn.Parameter, name: str) -> None:
    """Move a parameter to dense memory if its layout has gaps, or if some of its elements share memory."""
    expected = 1
    for stride, extent in sorted(zip(parameter.stride(), parameter.shape, strict=True)):
        if extent != 1 and stride != expected:
            unshared = torch.empty(1, device=parameter.device)
            if count_uses(parameter.untyped_storage()) > count_uses(unshared.untyped_storage()):
                raise UsageError(
                    f"{name} of shape {tuple(parameter.shape)} has strides {parameter.stride()}, which leave gaps "
                    "or use an element twice, and another tensor refers to the same memory; make the parameter "
                    "contiguous, or use the optimizer without ShardedOptimizer"
                )
            parameter.data = parameter.data.contiguous()
            return
        expected *= extent
