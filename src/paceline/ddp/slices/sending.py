"""Sends a slice from one rank to all others, with the seed of its random streams."""

from __future__ import annotations

import io
import pickle
from typing import Any

import torch
from torch import Tensor

from paceline.core.state.rng import seed_all
from paceline.ddp.transport.channel import Channel
from paceline.errors import UsageError

_REFUSED = -1
"""In place of the size of a slice that cannot be pickled."""


class Sent:
    """A slice, of which every rank can make as many copies as it likes.

    A copy for each computation, because the loop's body may change its batch.
    """

    def __init__(self, content: bytes) -> None:
        self._content = content

    def unpacked(self) -> Any:
        """Return a copy of the slice, after its random streams have begun."""
        batch, seed = pickle.loads(self._content)
        seed_all(seed)
        return batch


def send(channel: Channel, source: int, slice_and_seed: tuple[Any, int] | None) -> Sent | None:
    """Send a slice and its seed from rank `source` to all; called by all ranks, with None where it has none."""
    content, size = b"", 0
    if channel.rank == source and slice_and_seed is not None:
        try:
            content = _pickled(slice_and_seed)
            size = len(content)
        except Exception:  # of pickle, and of classes in the batch
            size = _REFUSED
    sizes, launched = channel.gather_rows(torch.tensor(size))
    channel.meet(launched, "sending of a slice")
    if (size := int(sizes[source])) == _REFUSED:
        raise UsageError(
            f"check_compute_every sends slices to other ranks, and a batch of rank {source} cannot be pickled; return "
            "tensors and plain values from the data set and collate_fn"
        )
    if not size:
        return None
    flat = torch.zeros(size, dtype=torch.uint8)
    if content:
        flat.copy_(torch.frombuffer(bytearray(content), dtype=torch.uint8))
    channel.meet(channel.host.all_reduce(flat), "sending of a slice")
    return Sent(flat.numpy().tobytes())


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        # A view would take all of its memory along, such as the whole data set.
        if isinstance(value, Tensor) and value.untyped_storage().nbytes() > value.nbytes:
            return value.clone().__reduce_ex__(pickle.DEFAULT_PROTOCOL)
        return NotImplemented


def _pickled(value: Any) -> bytes:
    file = io.BytesIO()
    _Pickler(file).dump(value)
    return file.getvalue()
