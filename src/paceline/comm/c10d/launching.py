"""The part of a process group that the reducer uses: shared memory, and reductions that no thread works on."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from paceline.comm.c10d.delegating import Delegating
from paceline.comm.shm.collectives import Collectives
from paceline.comm.shm.engine import Engine
from paceline.comm.shm.header import Note
from paceline.comm.shm.operation import Operation
from paceline.core.torch_internals.compile import class_never_compiled
from paceline.errors import UsageError


@class_never_compiled
class Launching(Delegating):
    """A process group whose reductions can be launched in shared memory, where all ranks are on one host."""

    _engine: Engine | None
    _collectives: Collectives | None
    """The native collectives; None where there are none."""
    _why_gloo: str
    """Why there is no engine, if there is none."""

    @property
    def native(self) -> bool:
        """Whether all ranks are on one host and share memory, so that :meth:`launch_all_reduce` works."""
        return self._collectives is not None

    def allocate(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Allocate a zeroed flat tensor of `numel` elements in shared memory, which collectives use where it lies.

        Raises:
            UsageError: if the host has not that much memory, or the group does not use shared memory.
        """
        return self._whole_engine().arena.allocate(numel, dtype)

    def holds(self, tensor: Tensor) -> bool:
        """Tell whether `tensor` lies in this rank's shared memory."""
        return self._whole_engine().arena.offset_of(tensor) is not None

    def free(self, tensor: Tensor) -> None:
        """Give back a tensor that :meth:`allocate` returned."""
        self._whole_engine().arena.free(tensor)

    def launch_all_reduce(
        self, tensor: Tensor, note: Note | None = None, factor: Callable[[Sequence[Note]], float] | None = None
    ) -> Operation:
        """Begin the sum of `tensor`, which :meth:`allocate` gave, times `factor` of all ranks' notes.

        No thread works on it: :meth:`progress` carries it on, :meth:`wait_for` waits.
        """
        return self._native.post_all_reduce(tensor, ReduceOp.SUM, None, note, factor)

    def launch_gather(self, tensor: Tensor, parts: Sequence[Sequence[slice]]) -> Operation:
        """Begin to copy `parts` of the other ranks' tensors, one list for each rank, into `tensor`, in place.

        :meth:`allocate` gave it on every rank. No thread works on it, as in :meth:`launch_all_reduce`.
        """
        return self._native.post_gather(tensor, parts)

    def launch_reduce_scatter(
        self,
        tensor: Tensor,
        parts: Sequence[Sequence[slice]],
        note: Note | None = None,
        factor: Callable[[Sequence[Note]], float] | None = None,
    ) -> Operation:
        """Begin the sum of `tensor`; each rank gets its own of the `parts`, one list for each rank, in place.

        :meth:`allocate` gave it on every rank. Otherwise as :meth:`launch_all_reduce`.
        """
        return self._native.post_reduce_scatter(tensor, parts, note, factor)

    def progress(self) -> None:
        """Take launched operations as far as they go now, without waiting."""
        self._whole_engine().progress()

    def wait_for(self, operation: Operation) -> None:
        """Wait for a launched operation."""
        self._whole_engine().wait(operation)

    def launch_own_sum(self, shown: Tensor, result: Tensor) -> Operation:
        """Begin the sum of the tensors that the ranks of one host show; each computes it into its own flat `result`.

        :meth:`allocate` gave `shown`, which is not to be written to until the operation is finished. No thread works on
        it, as in :meth:`launch_all_reduce`.
        """
        return self._native.post_own_sum(shown, result)

    def wait_for_own(self, operation: Operation) -> None:
        """Wait until an operation that :meth:`launch_own_sum` began has its result on this rank."""
        self._whole_engine().agree(operation)

    @property
    def _native(self) -> Collectives:
        assert self._collectives is not None, "only among ranks that share memory; see native"
        return self._collectives

    def _whole_engine(self) -> Engine:
        if self._engine is None:
            raise UsageError(f"rank {self.rank()}: {self._why_gloo}")
        return self._engine
