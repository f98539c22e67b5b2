"""Buffers that a forward pass changes, with virtual ranks: each slice begins with the values from before the step.

    before ──► slice 0 ──► kept
    before ──► slice 1 ──► dropped          after the step, on every rank: the buffers of slice 0
    before ──► slice 2 ──► dropped

A module with such buffers (spectral norm, a moving average, a counter) therefore trains as it would on as many ranks as
there are slices, with one slice per rank, and ends the step with rank 0's buffers. BatchNorm's statistics are added up
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
    """A snapshot of the buffers of `module`.

    A forward pass may write to buffers in place or replace them with other tensors; :meth:`restore` undoes both.

    Args:
        module: the module.
        left_out: buffers to leave out of the snapshot, each as the ``id`` of its submodule and its name.
    """

    _places: list[tuple[dict[str, Tensor | None], str, Tensor | None, Tensor | None]]
    """For each buffer: the dict that holds it, its name, the tensor, and a copy of its values."""

    def __init__(self, module: nn.Module, left_out: Collection[tuple[int, str]] = ()) -> None:
        self._places = [
            (part._buffers, name, buffer, None if buffer is None else buffer.detach().clone())
            for part in module.modules()
            for name, buffer in part._buffers.items()
            if (id(part), name) not in left_out
        ]

    def restore(self) -> None:
        """Put the saved values back into the original tensors, and these into the module."""
        for held, name, buffer, value in self._places:
            if buffer is not None and value is not None:
                buffer.data.copy_(value)  # through .data, because autograd may have saved the buffer
            held[name] = buffer


class SliceBuffers:
    """The buffers of one wrapper's module during a step, except the buffers that `statistics` adds up.

    A rank with only one slice per step makes no copies, because rank 0's buffers are broadcast anyway.
    """

    def __init__(self, watch: ModuleWatch, statistics: SliceStatistics, sync: BufferSync) -> None:
        self._watch, self._statistics, self._sync = watch, statistics, sync
        self._own: dict[str, tuple[Tensor, int, int]] = {}
        """What :meth:`_looks` returned before the step."""
        self._is_first_step = True
        """Whether no step has been completed yet."""
        self._before: SavedBuffers | None = None
        """The buffers from before the step; None between steps, and on a rank with one slice."""
        self._kept: SavedBuffers | None = None
        """The buffers after this rank's first slice; set when the second slice begins."""

    def begin_slice(self, *, is_first: bool, is_only: bool) -> None:
        """Begin a slice with the buffers from before the step; `is_only` if this rank has no other slice."""
        if is_first:
            self._kept = None
            self._before = None if is_only else self._save()
            self._own = self._looks()
        elif self._before is not None:
            if self._kept is None:
                self._kept = self._save()
            self._before.restore()

    def leave_step(self) -> None:
        """Restore the buffers from before a step that is abandoned.

        This cannot wait until the next step, because a checkpoint may be loaded before it.
        """
        if self._before is not None:
            self._before.restore()
        self._before = self._kept = None
        self._own = {}

    def end_step(self) -> None:
        """Restore the buffers that the first slice produced."""
        if self._own:
            current = self._looks()
            for name, (buffer, *look) in self._own.items():
                if name not in current or current[name][0] is not buffer or [*current[name][1:]] != look:
                    cause = "its name in _ddp_params_and_buffers_to_ignore"
                    raise UsageError(
                        f"a forward has changed buffer {name!r}, which would differ between ranks without a broadcast; "
                        f"leave {cause if self._sync.is_wanted else 'broadcast_buffers=False'} out with virtual_ranks"
                    )
        self._is_first_step = False
        if self._kept is not None:
            self._kept.restore()
        self._before = self._kept = None

    def _looks(self) -> dict[str, tuple[Tensor, int, int]]:
        """Return, by name, each buffer that is not broadcast, with its version and a digest, to detect changes."""
        # Values are digested only in the first step, because that reads them. Writes through .data do not change the
        # version.
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
