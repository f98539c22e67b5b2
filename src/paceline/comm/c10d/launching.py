"""The part of a process group that the reducer uses: shared memory, and reductions that need no thread."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.comm.c10d.delegating import Delegating
from paceline.comm.shm.collectives import Collectives
from paceline.comm.shm.engine import Engine
from paceline.comm.shm.operation import Operation
from paceline.core.torch_internals.compile import class_never_compiled
from paceline.errors import UsageError


@class_never_compiled
class Launching(Delegating):
    """A process group whose reductions can be launched in shared memory if all ranks are on one host.

    No thread works on a launched operation: :meth:`progress` advances it, and its own ``wait`` waits for it.
    """

    _engine: Engine | None
    _collectives: Collectives | None
    """The native collectives; None without shared memory."""
    _why_gloo: str
    """Reason why there is no engine, if there is none."""

    @property
    def native(self) -> bool:
        """Whether all ranks are on one host and share memory, so that :meth:`launch_all_reduce` works."""
        return self._collectives is not None

    def allocate(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Allocate a zeroed flat tensor of `numel` elements in shared memory, which collectives use without a copy."""
        return self._usable_engine().arena.allocate(numel, dtype)

    def holds(self, tensor: Tensor) -> bool:
        """Return whether `tensor` lies in this rank's shared memory."""
        return self._usable_engine().arena.offset_of(tensor) is not None

    def free(self, tensor: Tensor) -> None:
        """Free a tensor that :meth:`allocate` returned."""
        self._usable_engine().arena.free(tensor)

    def launch_all_reduce(self, tensor: Tensor) -> Operation:
        """Begin the sum of `tensor`, which :meth:`allocate` returned, in place."""
        return self._native.post_all_reduce(tensor)

    def launch_gather(self, tensor: Tensor, places: Sequence[Sequence[tuple[Tensor, slice]]]) -> Operation:
        """Begin to copy elements of the other ranks' `tensor`, which :meth:`allocate` returned, to `places`.

        For each rank these are tensors to copy into, and the elements of that rank's `tensor` for each.
        """
        return self._native.post_gather(tensor, places)

    def progress(self) -> None:
        """Advance launched operations as far as they go now, without waiting."""
        self._usable_engine().progress()

    def launch_own_sum(self, tensor: Tensor) -> Operation:
        """Begin the sum of a flat `tensor`, wherever it lies, in place, each rank for itself.

        So the sum is whole as soon as every rank has launched it, and no rank waits for another one's part.
        """
        return self._native.post_own_sum(tensor)

    @property
    def _native(self) -> Collectives:
        if self._collectives is None:
            raise UsageError(f"rank {self.rank()}: {self._why_gloo}")
        return self._collectives

    def _usable_engine(self) -> Engine:
        if self._engine is None:
            raise UsageError(f"rank {self.rank()}: {self._why_gloo}")
        return self._engine
