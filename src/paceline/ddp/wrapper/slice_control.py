"""Methods for the slices of virtual ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch.distributed as dist

from paceline.core.state.virtual_ranks import check_same_count, slices_of_rank
from paceline.ddp.engine.connection import Connection
from paceline.ddp.engine.interface import GradientEngine
from paceline.ddp.engine.replica import Replica
from paceline.ddp.options.config import Options, check_summable
from paceline.ddp.slices.compute_check import ComputeCheck
from paceline.errors import UsageError


class SliceControl:
    """A base of the wrapper without state of its own."""

    process_group: dist.ProcessGroup
    _connection: Connection | None
    _engine: GradientEngine
    _options: Options
    _replica: Replica

    @property
    def virtual_ranks(self) -> int | None:
        """Number of slices over which a step's gradient is summed in a fixed tree; None for an ordinary step."""
        return self._options.virtual_ranks or None

    @property
    def slice_number(self) -> int:
        """The slice under way, counted from 0 among this rank's; always 0 without virtual ranks."""
        slices = None if self._connection is None else self._connection.virtual_ranks
        return 0 if slices is None else slices.number

    def use_virtual_ranks(self, count: int) -> None:
        """Sum each gradient over `count` slices from the next step on, as the argument ``virtual_ranks`` does.

        All ranks call it, between two steps; the Trainer does so for its config.

        Raises:
            UsageError: if the model cannot be trained so, or another number was given before.
        """
        check_same_count("the model", self.virtual_ranks, count)
        if self.virtual_ranks == count:
            return
        options = replace(
            self._options, virtual_ranks=check_summable(count, self._options.algorithm, self._options.reduce_dtype)
        )
        slices_of_rank(count, 0, dist.get_world_size(self.process_group))
        if vars(self).get("buffer_hook") is not None:
            raise self._buffer_hook_refused(count)
        self._engine.check_idle()
        connection = self._connected()
        if owner := connection.reducer.finisher.owner:
            raise UsageError(
                f"{owner} adds up gradients in an order of its own; leave it out with virtual_ranks={count}"
            )
        self._connection = connection.with_virtual_ranks(count, self._replica.watch)
        self._options = options

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
        slices = self._connected().virtual_ranks
        assert slices is not None
        slices.begin_slice(number, filled)
        self._engine.sync_enabled = number in filled[-1:] or not filled

    def end_slices(self) -> None:
        """End a step, after its last slice. :func:`paceline.accumulate` calls it.

        Raises:
            UsageError: if its gradients were not synchronized.
        """
        slices = self._connected().virtual_ranks
        assert slices is not None
        slices.end_step()

    def leave_slices(self) -> None:
        """Leave the step under way, if there is one, in the middle. :func:`paceline.accumulate` calls it at its end."""
        slices = None if self._connection is None else self._connection.virtual_ranks
        if slices is not None:
            slices.leave_step()

    @property
    def is_repeat(self) -> bool:
        """Whether the present slice is computed a second time, for ``check_compute_every``, and counts nowhere."""
        slices = None if self._connection is None else self._connection.virtual_ranks
        return slices is not None and slices.compute_check is not None and slices.compute_check.is_repeat

    def compute_check(self) -> ComputeCheck | None:
        """Return the check of ``check_compute_every``; None without it. :func:`paceline.accumulate` runs it."""
        if not (every := self._options.check_compute_every):
            return None
        connection = self._connected()
        slices = connection.virtual_ranks
        assert slices is not None
        if slices.compute_check is None:
            replica = self._replica  # not the wrapper, which the check must not keep alive
            slices.compute_check = ComputeCheck(every, connection.reducer, slices, lambda: replica.module)
        return slices.compute_check

    def _connected(self) -> Connection:
        if self._connection is None:
            self._engine.connected()
        assert self._connection is not None
        return self._connection

    def _register_buffer_comm_hook(self, *arguments: Any, **keywords: Any) -> None:
        """Register a hook that synchronizes buffers, as torch."""
        if count := self._options.virtual_ranks:
            raise self._buffer_hook_refused(count)
        super()._register_buffer_comm_hook(*arguments, **keywords)  # type: ignore[misc]

    def _buffer_hook_refused(self, count: int) -> UsageError:
        return UsageError(
            f"a buffer hook (_register_buffer_comm_hook) does not go with virtual_ranks={count}: it would make buffers "
            "of each rank's last slice, not of the first of all; leave one of the two out"
        )

    def refuse_with_virtual_ranks(self, feature: str, reason: str) -> None:
        """Refuse a feature that virtual ranks do not go with.

        Raises:
            UsageError: if the wrapper has virtual ranks.
        """
        if count := self._options.virtual_ranks:
            raise UsageError(f"{feature} does not go with virtual_ranks={count}: {reason}; leave one of the two out")
