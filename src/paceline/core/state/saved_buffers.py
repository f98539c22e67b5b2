"""The values of a module's buffers at one moment, which come back after a forward that must leave no trace."""

from __future__ import annotations

from collections.abc import Collection

from torch import nn


class SavedBuffers:
    """The buffers of `module`, and their values.

    A forward may write into buffers in place, or put others into their places; both are undone.

    Args:
        module: the module.
        left_out: buffers to leave alone: the ``id`` of the part of the module that has them, and their names.
    """

    def __init__(self, module: nn.Module, left_out: Collection[tuple[int, str]] = ()) -> None:
        self._places = [
            (part._buffers, name, buffer, None if buffer is None else buffer.detach().clone())
            for part in module.modules()
            for name, buffer in part._buffers.items()
            if (id(part), name) not in left_out
        ]

    def restore(self) -> None:
        """Give the buffers these values again, in the tensors that held them."""
        for held, name, buffer, value in self._places:
            if buffer is not None and value is not None:
                buffer.data.copy_(value)  # through .data, as a backward may still have saved it
            held[name] = buffer
