"""A wrapper's channel among ranks that share memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.comm.shm_collectives import SMALL_BYTES
from paceline.comm.shm_engine import Operation
from paceline.ddp.channel import Channel, Launched


class SharedChannel(Channel):
    """A channel through shared memory. Backward hooks reduce buckets: small ones from copies, others in place."""

    sums_in_tree = True

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device | str = "cpu") -> Tensor:
        tensor: Tensor = self.group.allocate(numel, dtype)
        return tensor

    def free(self, tensor: Tensor) -> None:
        self.group.free(tensor)

    def all_reduce(self, tensor: Tensor) -> Launched:
        """Launch the sum of `tensor`. Large tensors not returned by :meth:`allocate` are copied there and back."""
        self.count_launch()
        launched: Launched
        if tensor.nbytes <= SMALL_BYTES:
            launched = self.group.launch_own_sum(tensor.view(-1))
        elif self.group.holds(tensor):
            launched = self.group.launch_all_reduce(tensor)
        else:
            launched = _CopiedBack(self, tensor)
        return launched

    def gather(self, tensor: Tensor, places: Sequence[Sequence[tuple[Tensor, slice]]]) -> Launched:
        """Start copying from the other ranks' `tensor`, allocated by :meth:`allocate`, into this rank's tensors.

        Waiting for the result returns once no rank reads from this rank's memory any longer.

        Args:
            tensor: the tensor that other ranks read; it has the same length on every rank.
            places: for each rank, the tensors to copy into, each with the slice of that rank's `tensor` to copy.
        """
        self.count_launch()
        operation: Operation = self.group.launch_gather(tensor, places)
        return operation

    def progress(self) -> None:
        self.group.progress()


class _CopiedBack:
    """A launched reduction of a copy in shared memory, because peers can only read the group's own memory."""

    def __init__(self, channel: SharedChannel, tensor: Tensor) -> None:
        self._channel, self._tensor = channel, tensor
        self._copy: Tensor | None = channel.allocate(tensor.numel(), tensor.dtype)
        self._copy.copy_(tensor.view(-1))
        self._operation: Operation = channel.group.launch_all_reduce(self._copy)

    def is_completed(self) -> bool:
        return self._operation.is_completed()

    def wait(self) -> None:
        self._operation.wait()
        if self._copy is not None:
            self._tensor.view(-1).copy_(self._copy)
            self._channel.free(self._copy)
            self._copy = None
