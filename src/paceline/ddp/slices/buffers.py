"""Buffers that forwards change, with virtual ranks: each slice begins with those from before the step.

    before ──► slice 0 ──► kept
    before ──► slice 1 ──► dropped          after the step, on every rank: what slice 0 has left
    before ──► slice 2 ──► dropped

So a module with such a state (spectral norm, a moving average, a counter) trains as on as many ranks as there are
slices, where each rank computes one, and gets the buffers of rank 0 after it. BatchNorm's statistics are added up
instead (:mod:`.statistics`).
"""

from __future__ import annotations

from paceline.core.state.saved_buffers import SavedBuffers
from paceline.ddp.consistency.buffer_sync import BufferSync
from paceline.ddp.consistency.module_changes import ModuleWatch
from paceline.ddp.slices.statistics import SliceStatistics
from paceline.errors import UsageError


class SliceBuffers:
    """The buffers of one wrapper's module in a step, but for those that `statistics` adds up.

    A rank that computes only one slice in a step copies nothing: the broadcast of rank 0's buffers does the rest.
    """

    def __init__(self, watch: ModuleWatch, statistics: SliceStatistics, sync: BufferSync) -> None:
        self._watch, self._statistics, self._sync = watch, statistics, sync
        self._versions: dict[str, tuple[int, int]] = {}
        """The buffers' versions before the step, where they are not broadcast after it."""
        self._before: SavedBuffers | None = None
        """The buffers from before the step; None between steps, and where a rank has one slice."""
        self._kept: SavedBuffers | None = None
        """The buffers that this rank's first slice has left, once another one has begun."""

    def begin_slice(self, *, is_first: bool, is_only: bool) -> None:
        """Begin this rank's first slice of a step, or another one, with the buffers from before the step."""
        if is_first:
            self._kept = None
            self._before = None if is_only else self._save()
            self._versions = {} if self._sync.is_wanted else self._sync.versions()
        elif self._before is not None:
            if self._kept is None:
                self._kept = self._save()
            self._before.restore()

    def leave_step(self) -> None:
        """Let the buffers be those from before a step that was left in the middle.

        At once: a checkpoint may be loaded before the next step.
        """
        if self._before is not None:
            self._before.restore()
        self._before = self._kept = None
        self._versions = {}

    def end_step(self) -> None:
        """Let the buffers be those that the first slice has left.

        Raises:
            UsageError: if they have changed, and are not broadcast.
        """
        if self._versions:
            now = self._sync.versions()
            added = {id(getattr(layer, name)) for layer, name in self._statistics.buffers}
            for name, before in self._versions.items():
                if now.get(name) != before and before[0] not in added:
                    raise UsageError(
                        f"a forward has changed buffer {name!r}, which is another on each rank without a broadcast; "
                        "leave broadcast_buffers=False out with virtual_ranks"
                    )
        if self._kept is not None:
            self._kept.restore()
        self._before = self._kept = None

    def _save(self) -> SavedBuffers:
        left_out = {(id(layer), name) for layer, name in self._statistics.buffers}
        return SavedBuffers(self._watch.module, left_out)
