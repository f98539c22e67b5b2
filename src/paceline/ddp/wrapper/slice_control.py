"""Methods for the slices of virtual ranks."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.ddp.engine.connection import Connection
from paceline.ddp.engine.interface import GradientEngine
from paceline.ddp.engine.replica import Replica
from paceline.ddp.options.config import Options
from paceline.ddp.slices.compute_check import ComputeCheck
from paceline.errors import UsageError


class SliceControl:
    """A base of the wrapper without state of its own."""

    _connection: Connection | None
    _engine: GradientEngine
    _options: Options
    _replica: Replica

    @property
    def virtual_ranks(self) -> int | None:
        """Number of slices over which a step's gradient is summed in a fixed tree; None for an ordinary step."""
        return self._options.virtual_ranks or None

    def begin_slice(self, number: int, filled: Sequence[int]) -> None:
        """Begin slice `number` of this rank's in a step; a backward is synchronized in the last one.

        :func:`paceline.accumulate` calls it, for a wrapper with :attr:`virtual_ranks`.

        Args:
            number: counted from 0.
            filled: the slices of the step that have samples, ascending. If it is empty, the gradients are synchronized
                without a backward.

        Raises:
            UsageError: if a gradient was kept from the step before, or has no dense form.
        """
        self._engine.resync_aborted()
        if self._connection is None:
            self._engine.connected()
        assert self._connection is not None
        assert self._connection.virtual_ranks is not None
        self._connection.virtual_ranks.begin_slice(number, filled)
        self._engine.sync_enabled = number in filled[-1:] or not filled

    @property
    def is_repeat(self) -> bool:
        """Whether the present slice is computed a second time, for ``check_compute_every``, and counts nowhere."""
        slices = None if self._connection is None else self._connection.virtual_ranks
        return slices is not None and slices.compute_check is not None and slices.compute_check.is_repeat

    def compute_check(self) -> ComputeCheck | None:
        """Return the check of ``check_compute_every``; None without it. :func:`paceline.accumulate` runs it."""
        if not (every := self._options.check_compute_every):
            return None
        if self._connection is None:
            self._engine.connected()
        assert self._connection is not None
        slices = self._connection.virtual_ranks
        assert slices is not None
        if slices.compute_check is None:
            replica = self._replica  # not the wrapper, which the check must not keep alive
            slices.compute_check = ComputeCheck(every, self._connection.reducer, slices, lambda: replica.module)
        return slices.compute_check

    def refuse_with_virtual_ranks(self, feature: str, reason: str) -> None:
        """Refuse a feature that virtual ranks do not go with.

        Raises:
            UsageError: if the wrapper has virtual ranks.
        """
        if count := self._options.virtual_ranks:
            raise UsageError(f"{feature} does not go with virtual_ranks={count}: {reason}; leave one of the two out")
