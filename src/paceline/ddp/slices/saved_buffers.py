"""The values of a module's buffers at one moment, which come back after a forward that must leave no trace."""

from __future__ import annotations

from collections.abc import Collection

from torch import Tensor, nn

from paceline.core.torch_internals.tensors import is_plain


class SavedBuffers:
    """The buffers of `module`, and their values.

    A forward may write into buffers in place, or put others into their places; both are undone.

    Args:
        module: the module.
        left_out: buffers to leave alone: the ``id`` of the part of the module that has them, and their names.
        spare: values from before that nobody needs any more, whose memory is used again. Fresh memory takes several
            times as long as a copy does.
    """

    _places: list[tuple[dict[str, Tensor | None], str, Tensor | None, Tensor | None]]
    """For each buffer the dict that holds it, its name, the tensor, and a copy of its values."""

    def __init__(
        self, module: nn.Module, left_out: Collection[tuple[int, str]] = (), spare: SavedBuffers | None = None
    ) -> None:
        memory = {} if spare is None else {(id(held), name): value for held, name, _, value in spare._places}
        self._places = [
            (part._buffers, name, buffer, _copied(buffer, memory.get((id(part._buffers), name))))
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


def _copied(buffer: Tensor | None, memory: Tensor | None) -> Tensor | None:
    """Return a copy of `buffer`, in `memory` if that is like it."""
    if buffer is None:
        return None
    look = (buffer.shape, buffer.dtype, buffer.device)
    if memory is None or look != (memory.shape, memory.dtype, memory.device):
        return buffer.detach().clone()
    return memory.copy_(buffer.detach()) if is_plain(buffer) and is_plain(memory) else buffer.detach().clone()
