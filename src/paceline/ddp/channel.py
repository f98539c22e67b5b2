"""The channel: where one wrapper's collectives travel, apart from every other wrapper's.

With two wrapped models on one group, the order of operations can differ between ranks (a GAN's two backwards, say),
and collectives that pair up by order would mix them. A channel keeps each wrapper's order to itself: a group of its
own.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _broadcast_coalesced

from paceline.comm.header import Note
from paceline.comm.process_group import PacelineProcessGroup
from paceline.ddp.control import scale_of
from paceline.errors import CommunicationError, PacelineError


class Launched(Protocol):
    """A collective under way."""

    def wait(self) -> Any:
        """Return when it is finished."""


class Channel:
    """The collectives of one wrapper; every method is called in the same order on every rank of `group`."""

    scales = False
    """Whether reductions with a note come out scaled; if not, they are plain sums."""
    blocks = False
    """Whether a launch returns only when every rank has taken part."""

    def __init__(self, group: dist.ProcessGroup, own: Any) -> None:
        self.rank: int = dist.get_rank(group)
        self.size: int = dist.get_world_size(group)
        self.group = own
        self.name: str = own.group_name
        self.ranks: list[int] = dist.get_process_group_ranks(group)
        self._is_numbered = len(self.ranks) == dist.get_world_size()

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device | str = "cpu") -> Tensor:
        """A zeroed flat tensor that reductions take best."""
        return torch.zeros(numel, dtype=dtype, device=device)

    def free(self, tensor: Tensor) -> None:
        """Give back what :meth:`allocate` gave."""

    def all_reduce(self, tensor: Tensor, note: Note | None = None) -> Launched:
        """Launch the sum of `tensor` over all ranks, in place, scaled as `note` says if the channel :attr:`scales`."""
        work: dist.Work = dist.all_reduce(tensor, group=self.group, async_op=True)
        return work

    def progress(self) -> None:
        """Take what was launched as far as it goes now, without waiting."""

    def broadcast(self, tensors: Sequence[Tensor], source: int = 0) -> None:
        """Make `tensors` equal to those of rank `source`, in place; returns when that is done."""
        if tensors:
            self.run("broadcast", _broadcast_coalesced, self.group, list(tensors), 25 * 2**20, source)

    def all_gather_object(self, value: Any) -> list[Any]:
        """Every rank's `value`, in the order of ranks."""
        values: list[Any] = [None] * self.size
        self.run("all-gather", dist.all_gather_object, values, value, group=self.group)
        return values

    def wait(self, launched: Launched, what: str) -> None:
        """Wait for a launched collective.

        Raises:
            CommunicationError: if it failed; names `what` and this rank.
        """
        self.run(what, launched.wait)

    def linger(self, launched: Any, seconds: float) -> None:
        """Carry `launched` on until it is finished or failed, for at most so many seconds, without raising."""
        end = time.monotonic() + seconds
        with suppress(Exception):
            while not launched.is_completed() and time.monotonic() < end:
                self.progress()
                time.sleep(0.001)

    def run(self, what: str, function: Any, *arguments: Any, **options: Any) -> None:
        """Call a collective, with a failure turned into an error that says what it was doing."""
        try:
            function(*arguments, **options)
        except PacelineError:
            raise
        except RuntimeError as error:
            raise CommunicationError(
                f"rank {self.rank}: the {what} with the other {self.size - 1} ranks failed, most likely because one "
                f"of them ended or is stuck; look for the first error of another rank ({error})"
            ) from error

    def close(self) -> None:
        """Give the channel's connections back, unless the process group is gone already."""
        if self._is_numbered and self.group in dist.distributed_c10d._world.pg_map:
            dist.destroy_process_group(self.group)


class SharedChannel(Channel):
    """A channel through shared memory: buckets are reduced where they lie, by the hooks of backward."""

    scales = True

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device | str = "cpu") -> Tensor:
        """A zeroed flat tensor in shared memory."""
        tensor: Tensor = self.group.allocate(numel, dtype)
        return tensor

    def free(self, tensor: Tensor) -> None:
        """Give its memory back to the host."""
        self.group.free(tensor)

    def all_reduce(self, tensor: Tensor, note: Note | None = None) -> Launched:
        """Launch the sum of `tensor`; one that :meth:`allocate` did not give takes a copy there and back."""
        return _InSharedMemory(self, tensor, note)

    def progress(self) -> None:
        """Reduce what every rank has launched."""
        self.group.progress()


class _InSharedMemory:
    """A launched reduction."""

    def __init__(self, channel: SharedChannel, tensor: Tensor, note: Note | None) -> None:
        self._channel, self._tensor, self._copy = channel, tensor, None
        shared = tensor
        if not channel.group.holds(tensor):
            self._copy = shared = channel.allocate(tensor.numel(), tensor.dtype)
            shared.copy_(tensor.view(-1))
        factor = scale_of if note is not None else None
        self._operation = channel.group.launch_all_reduce(shared, note, factor)

    def is_completed(self) -> bool:
        """Whether it is finished."""
        finished: bool = self._operation.finished
        return finished

    def wait(self) -> None:
        """Return when it is finished."""
        self._channel.group.finish(self._operation)
        if self._copy is not None:
            self._tensor.view(-1).copy_(self._copy)
            self._channel.free(self._copy)
            self._copy = None


def open_channel(group: dist.ProcessGroup, device: torch.device) -> Channel:
    """A channel among the ranks of `group` for gradients on `device`; called by all of them together."""
    ranks = dist.get_process_group_ranks(group)
    # The control block is host data: beside CUDA tensors it goes over Gloo, which stalls no stream.
    # Otherwise the backend is the group's own, which need not be that of the world.
    on_nccl = device.type == "cuda" and "nccl" in str(dist.get_backend_config(group))
    backend = "cpu:gloo,cuda:nccl" if on_nccl else dist.get_backend(group)
    # Ranks outside `group` do not come here, so a part of the world has to make its group by itself. torch names such a
    # group by its ranks; to make one again after it was destroyed would meet the first one's traces in the store.
    # Hence only groups of the whole world, which are numbered, are given back.
    whole = len(ranks) == dist.get_world_size()
    own: Any = dist.new_group(
        ranks, timeout=timeout_of(group, device), backend=backend, use_local_synchronization=not whole
    )
    shared = device.type == "cpu" and isinstance(own, PacelineProcessGroup) and own.native
    return SharedChannel(group, own) if shared else Channel(group, own)


def timeout_of(group: dist.ProcessGroup, device: torch.device) -> timedelta | None:
    """The group's own timeout, which a group made from it does not inherit by itself."""
    if isinstance(group, PacelineProcessGroup):
        return group.timeout
    options = getattr(group._get_backend(device), "options", None)
    timeout = getattr(options, "_timeout", None)
    return timeout if isinstance(timeout, timedelta) else None
