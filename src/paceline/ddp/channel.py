"""The channel: where one wrapper's collectives travel, apart from every other wrapper's.

With two wrapped models on one group, the order of operations can differ between ranks (a GAN's two backwards, say),
and collectives that pair up by order would mix them. A channel keeps each wrapper's order to itself: a group of its
own on Gloo and NCCL.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _broadcast_coalesced

from paceline.errors import CommunicationError


class Channel:
    """The collectives of one wrapper; every method is called in the same order on every rank of `group`."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.rank: int = dist.get_rank(group)
        self.size: int = dist.get_world_size(group)
        ranks = dist.get_process_group_ranks(group)
        # The control block is host data: beside CUDA tensors it goes over Gloo, which stalls no stream.
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else None
        # Ranks outside `group` do not come here, so a part of the world has to make its group by itself. torch names
        # such a group by its ranks; to make one again after it was destroyed would meet the first one's traces in
        # the store. Hence only groups of the whole world, which are numbered, are given back.
        self._whole_world = len(ranks) == dist.get_world_size()
        self.group: Any = dist.new_group(
            ranks,
            timeout=_timeout(group, device),
            backend=backend,
            use_local_synchronization=not self._whole_world,
        )

    def all_reduce(self, tensor: Tensor) -> dist.Work:
        """Launch the sum of `tensor` over all ranks, in place."""
        work: dist.Work = dist.all_reduce(tensor, group=self.group, async_op=True)
        return work

    def broadcast(self, tensors: Sequence[Tensor]) -> None:
        """Make `tensors` equal to rank 0's, in place; returns when that is done."""
        if tensors:
            self.run("broadcast", _broadcast_coalesced, self.group, list(tensors), 25 * 2**20, 0)

    def all_gather_object(self, value: Any) -> list[Any]:
        """Every rank's `value`, in the order of ranks."""
        values: list[Any] = [None] * self.size
        self.run("all-gather", dist.all_gather_object, values, value, group=self.group)
        return values

    def wait(self, work: dist.Work, what: str) -> None:
        """Wait for `work`.

        Raises:
            CommunicationError: if it failed; names `what` and this rank.
        """
        self.run(what, work.wait)

    def run(self, what: str, function: Any, *arguments: Any, **options: Any) -> None:
        """Call a collective, with a failure turned into an error that says what it was doing."""
        try:
            function(*arguments, **options)
        except RuntimeError as error:
            raise CommunicationError(
                f"rank {self.rank}: the {what} with the other {self.size - 1} ranks failed, most likely because one "
                f"of them ended or is stuck; look for the first error of another rank ({error})"
            ) from error

    def close(self) -> None:
        """Give the channel's connections back, unless the process group is gone already."""
        if self._whole_world and dist.is_initialized():
            dist.destroy_process_group(self.group)


def _timeout(group: dist.ProcessGroup, device: torch.device) -> timedelta | None:
    """The group's own timeout, which a group made from it does not inherit by itself."""
    options = getattr(group._get_backend(device), "options", None)
    timeout = getattr(options, "_timeout", None)
    return timeout if isinstance(timeout, timedelta) else None
