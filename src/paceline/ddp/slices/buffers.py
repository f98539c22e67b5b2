"""Buffers that forwards change, with virtual ranks: each slice begins with the buffers from before the step.

    before ──► slice 0 ──► kept
    before ──► slice 1 ──► dropped          after the step, on every rank: what slice 0 has left
    before ──► slice 2 ──► dropped

So a module with such a state (spectral norm, a moving average, a counter) trains as on as many ranks as there are
slices, one slice on each rank, and gets the buffers of rank 0 after it. BatchNorm's statistics are added up
instead (:mod:`.statistics`).
"""

from __future__ import annotations

from collections.abc import Collection

from torch import Tensor, nn

from paceline.core.state.digests import quick_digest
from paceline.core.torch_internals.distributed.dtensor import local_of
from paceline.core.torch_internals.tensors import is_plain
from paceline.ddp.consistency.buffer_sync import BufferSync
from paceline.ddp.consistency.module_changes import ModuleWatch
from paceline.ddp.slices.statistics import SliceStatistics
from paceline.errors import UsageError


class SavedBuffers:
    """The buffers of `module`, and their values.

    A forward may write into buffers in place, or put others into their places; both are undone.

    Args:
        module: the module.
        left_out: buffers to leave alone: the ``id`` of the part of the module that has them, and their names.
    """

    _places: list[tuple[dict[str, Tensor | None], str, Tensor | None, Tensor | None]]
    """For each buffer the dict that holds it, its name, the tensor, and a copy of its values."""

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
                buffer.data.copy_(value)  # through .data, because a backward may still have saved it
            held[name] = buffer


class SliceBuffers:
    """The buffers of one wrapper's module in a step, except the ones that `statistics` adds up.

    A rank with only one slice in a step makes no copies: the broadcast of rank 0's buffers does the rest.
    """

    def __init__(self, watch: ModuleWatch, statistics: SliceStatistics, sync: BufferSync) -> None:
        self._watch, self._statistics, self._sync = watch, statistics, sync
        self._own: dict[str, tuple[Tensor, int, int]] = {}
        """The looks, before the step, of buffers that are not broadcast after it."""
        self._is_first_step = True
        """Whether no step has come to its end."""
        self._before: SavedBuffers | None = None
        """The buffers from before the step; None between steps, and on a rank with one slice."""
        self._kept: SavedBuffers | None = None
        """The buffers that this rank's first slice has left, once another one has begun."""

    def begin_slice(self, *, is_first: bool, is_only: bool) -> None:
        """Begin this rank's first slice of a step, or another one, with the buffers from before the step."""
        if is_first:
            self._kept = None
            self._before = None if is_only else self._save()
            self._own = self._looks()
        elif self._before is not None:
            if self._kept is None:
                self._kept = self._save()
            self._before.restore()

    def leave_step(self) -> None:
        """Restore the buffers from before a step that was left in the middle.

        At once: a checkpoint may be loaded before the next step.
        """
        if self._before is not None:
            self._before.restore()
        self._before = self._kept = None
        self._own = {}

    def end_step(self) -> None:
        """Restore the buffers that the first slice has left."""
        if self._own:
            now = self._looks()
            for name, (before, *look) in self._own.items():
                if name not in now or now[name][0] is not before or [*now[name][1:]] != look:
                    cause = "its name in _ddp_params_and_buffers_to_ignore"
                    raise UsageError(
                        f"a forward has changed buffer {name!r}, which is another on each rank without a broadcast; "
                        f"leave {cause if self._sync.is_wanted else 'broadcast_buffers=False'} out with virtual_ranks"
                    )
        self._is_first_step = False
        if self._kept is not None:
            self._kept.restore()
        self._before = self._kept = None

    def _looks(self) -> dict[str, tuple[Tensor, int, int]]:
        """Return each buffer that is not broadcast, by name, and numbers that differ after a change."""
        # By value in the first step alone, which costs a read: writes through .data leave the version alone.
        added = {id(getattr(layer, name)) for layer, name in self._statistics.buffers}
        return {
            name: (buffer, buffer._version, self._digest(buffer))
            for name, buffer in self._sync.each_ranks_own().items()
            if id(buffer) not in added
        }

    def _digest(self, buffer: Tensor) -> int:
        local = local_of(buffer)
        return int(quick_digest(local)) if self._is_first_step and is_plain(local) else 0

    def _save(self) -> SavedBuffers:
        return SavedBuffers(self._watch.module, {(id(layer), name) for layer, name in self._statistics.buffers})
