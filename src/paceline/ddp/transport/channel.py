"""The channel: the collectives of one wrapper, on a separate process group.

With two wrapped models on one group, the order of operations can differ between ranks (a GAN's two backwards, say),
and collectives that pair up by order would mix them. With separate groups each wrapper's order is independent.

Decision 0004 says why.
"""

from __future__ import annotations

import atexit
import os
import pickle
import time
from collections.abc import Generator, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol, TypeAlias, TypeVar
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.core.processes.missing_ranks import failed
from paceline.core.processes.nccl_communicators import release
from paceline.core.telemetry.spans import COLLECTIVE, recorder
from paceline.core.torch_internals.distributed.c10d import (
    AllgatherOptions,
    AllreduceOptions,
    broadcast_coalesced,
    get_known_groups,
)
from paceline.errors import CommunicationError, PacelineError

Result = TypeVar("Result")
Pausing: TypeAlias = Generator[bool, None, Result]
"""Work at the end of a synchronized backward that launches collectives and later waits for them.

It yields True after a launch, and the caller may first run other wrappers up to their next pause. So all wrappers of a
backward launch before any of them waits, and ranks whose wrappers end in different order do not wait for each other in
a circle. It yields False to continue only at the next look at gradients, because control blocks are read late.
Inside another such generator it is run by ``yield from``, which returns its result.
"""


class Launched(Protocol):
    """A collective under way."""

    def wait(self) -> Any:
        """Return when it is finished."""


@dataclass
class Outstanding:
    """The number of collectives that were launched and not waited for with success; shared with a host channel."""

    count: int = 0


class Channel:
    """The collectives of one wrapper; every method is called in the same order on every rank of `group`."""

    blocks = False
    """Whether a launch returns only when every rank has taken part."""
    sums_in_tree = False
    """Whether :func:`paceline.comm.arithmetic.reduce_into` defines the sums on every rank."""

    def __init__(self, group: dist.ProcessGroup, own: Any) -> None:
        self.rank: int = dist.get_rank(group)
        self.size: int = dist.get_world_size(group)
        self.group = own
        """The group that carries the collectives. torch does not know it, so call its methods and no function of
        ``torch.distributed``: on an error these ask torch for the group's backend."""
        self.members = dist.get_process_group_ranks(group)
        """World ranks of the group's members, in its order, for messages."""
        self.name: str = own.group_name
        self.host: Channel = self
        """The channel for tensors in the host's memory; another one where gradients are on GPUs."""
        self.parent_group = group
        """The group that it was opened for."""
        # torch's own table, which a destroyed group leaves.
        self._process, self._living = os.getpid(), get_known_groups()
        self._options = AllreduceOptions()  # made once, because there is a launch for each bucket of each step
        self._options.asyncOp = True
        self._outstanding = Outstanding()
        _channels().add(self)

    def use_host(self, host: Channel) -> None:
        """Use `host` for tensors in the host's memory. Its collectives may be waited for on either channel."""
        self.host, host._outstanding = host, self._outstanding

    def check_open(self) -> None:
        """Refuse to begin a collective that no rank would answer."""
        if os.getpid() != self._process:
            raise CommunicationError(
                f"rank {self.rank}: this process was forked from a rank, and only the rank itself trains the wrapped "
                "model; call model.module here, or wrap a copy in a process group of the child's own"
            )
        if self.parent_group not in self._living:
            raise CommunicationError(
                f"rank {self.rank}: the process group of this DistributedDataParallel was destroyed; "
                "wrap the model again"
            )

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device | str = "cpu") -> Tensor:
        """Allocate a zeroed flat tensor, if possible in memory that reductions use without a copy."""
        return torch.zeros(numel, dtype=dtype, device=device)

    def free(self, tensor: Tensor) -> None:
        """Free a tensor that :meth:`allocate` returned, where Python's own references do not suffice."""

    def all_reduce(self, tensor: Tensor) -> Launched:
        """Launch the sum of `tensor` over all ranks, in place."""
        work: dist.Work = self.group.allreduce([tensor], self._options)
        self._outstanding.count += 1
        return work

    def progress(self) -> None:
        """Advance launched operations as far as they go now, without waiting."""

    def broadcast(self, tensors: Sequence[Tensor], source: int = 0) -> None:
        """Copy `tensors` from rank `source` to every rank; return when the copies are complete."""
        if tensors:
            with self.meeting():
                self.run("broadcast", broadcast_coalesced, self.group, tensors, 25 * 2**20, source)

    def all_gather(self, flat: Tensor) -> Launched:
        """Launch the gathering of every rank's :meth:`shard` of `flat` into all of it, in place."""
        if flat.is_complex():  # Gloo has no all-gather of complex numbers
            flat = torch.view_as_real(flat).view(-1)
        options = AllgatherOptions()
        options.asyncOp = True
        work: dist.Work = self.group._allgather_base(flat, self.shard(flat), options)
        self._outstanding.count += 1
        return work

    def shard(self, flat: Tensor) -> Tensor:
        """Return this rank's part of `flat`, a view: the rank-th of as many equal parts as there are ranks."""
        length, rest = divmod(flat.numel(), self.size)
        if rest:
            raise ValueError(f"{flat.numel()} elements cannot be cut into {self.size} equal shards; pad them")
        return flat[self.rank * length : (self.rank + 1) * length]

    def gather_rows(self, row: Tensor) -> tuple[Tensor, Launched]:
        r"""Launch the gathering of every rank's `row`; all have the same shape, dtype and kind of device.

        Returns:
            A tensor of shape (ranks, *shape of a row), which is whole once the collective is waited for.
        """
        # As a sum of tables with one row filled by each rank: every backend has that, and whole numbers stay exact.
        table = row.new_zeros(self.size, *row.shape)
        table[self.rank] = row
        return table, (self.host if row.is_cpu else self).all_reduce(table)

    def gather_numbers(self, numbers: Sequence[int], what: str) -> Pausing[list[list[int]]]:
        """Gather every rank's `numbers`, as many on each, in the order of ranks; `what` names them in errors."""
        table, launched = self.gather_rows(torch.tensor(numbers, dtype=torch.int64))
        yield True
        self.meet(launched, what)
        rows: list[list[int]] = table.tolist()
        return rows

    def all_gather_object(self, value: Any) -> list[Any]:
        # Not by torch.distributed.all_gather_object(), because torch does not know the group.
        local = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        sizes, launched = self.gather_rows(torch.tensor(len(local)))
        self.meet(launched, "all-gather of sizes")
        padded = torch.zeros(int(sizes.max()), dtype=torch.uint8)
        padded[: len(local)] = local
        table, launched = self.gather_rows(padded)
        self.meet(launched, "all-gather")
        return [pickle.loads(row[:size].numpy().tobytes()) for row, size in zip(table, sizes.tolist(), strict=True)]

    def count_launch(self) -> None:
        """Count a collective launched directly on :attr:`group`, which :meth:`wait` will be called for."""
        self._outstanding.count += 1

    def wait(self, launched: Launched, what: str, number: int | None = None) -> None:
        try:
            launched.wait()
        except PacelineError:
            raise
        except RuntimeError as error:
            what = what if number is None else f"{what} {number}"
            raise failed(what, self.members, self.members[self.rank], error) from error
        self._outstanding.count -= 1

    def meet(self, launched: Launched, what: str) -> None:
        """Wait as :meth:`wait` does, for a collective outside of the wait at the end of a backward."""
        with self.meeting():
            self.wait(launched, what)

    def meeting(self) -> AbstractContextManager[None]:
        """Record the block as a meeting of the ranks."""
        return recorder.span(COLLECTIVE, group=self.name)

    def abandon(self, _launched: Launched) -> None:
        """Count a collective of host data as done, without waiting: the channel can be closed while it runs."""
        self._outstanding.count -= 1

    def linger(self, launched: Any, seconds: float) -> None:
        """Advance `launched` until it is finished or failed, for at most `seconds`, without raising."""
        end = time.monotonic() + seconds
        with suppress(Exception):
            while not launched.is_completed() and time.monotonic() < end:
                self.host.progress()
                time.sleep(0.001)

    def run(self, what: str, function: Any, *arguments: Any, **options: Any) -> None:
        """Call the collective `function`; a failure becomes an error that names `what`."""
        try:
            function(*arguments, **options)
        except PacelineError:
            raise
        except RuntimeError as error:
            raise failed(what, self.members, self.members[self.rank], error) from error

    def close(self) -> None:
        """Close the channel's connections; NCCL's close once all ranks have done so."""
        if self.host.group is not self.group:  # one group may carry both
            self.host.close()
        if self.group is not None:
            # NCCL destroys a communicator only if all its work has ended, and aborts it otherwise.
            release(self.group, is_clean=self._outstanding.count == 0)

    def join_threads(self) -> None:
        """End Gloo's threads at the end of the process, if no collective is under way.

        A thread may let go of a work's tensors after the work was waited for. If it does so while the interpreter
        ends, it cannot get the interpreter's lock, and aborts the process.
        """
        is_gloo = self.group is not None and self.group.name() == "gloo"
        if is_gloo and os.getpid() == self._process and self._outstanding.count == 0:
            self.group = None  # its destructor joins them


@cache
def _channels() -> WeakSet[Channel]:
    """Return the channels of this process, whose threads end before the interpreter does."""
    channels: WeakSet[Channel] = WeakSet()
    atexit.register(_join_all, channels)
    return channels


def _join_all(channels: WeakSet[Channel]) -> None:
    for channel in list(channels):
        channel.join_threads()


class DeviceChannel(Channel):
    """A channel for tensors on one kind of device; :attr:`host` carries tensors in the host's memory."""

    def __init__(self, group: dist.ProcessGroup, own: Any, device: torch.device) -> None:
        super().__init__(group, own)
        self._kind = device.type

    def _carrier_of(self, device: torch.device | str) -> Channel:
        """Return this channel for its own kind of device, and :attr:`host` for any other."""
        return self if torch.device(device).type == self._kind else self.host

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device | str = "cpu") -> Tensor:
        """Allocate a zeroed flat tensor that its channel uses without a copy."""
        carrier = self._carrier_of(device)
        return super().allocate(numel, dtype, device) if carrier is self else carrier.allocate(numel, dtype, device)

    def free(self, tensor: Tensor) -> None:
        if (carrier := self._carrier_of(tensor.device)) is not self:
            carrier.free(tensor)

    def all_reduce(self, tensor: Tensor) -> Launched:
        """Launch the sum of `tensor` over all ranks, in place."""
        # Without _carrier_of(): to make an object of the device costs a tenth of a launch, which there are many of.
        return self.host.all_reduce(tensor) if tensor.is_cpu else Channel.all_reduce(self, tensor)

    def broadcast(self, tensors: Sequence[Tensor], source: int = 0) -> None:
        """Copy `tensors` from rank `source` to every rank; return when the copies are complete."""
        super().broadcast([tensor for tensor in tensors if tensor.device.type == self._kind], source)
        self.host.broadcast([tensor for tensor in tensors if tensor.device.type != self._kind], source)


class HostChannel(Channel):
    """Sums through shared memory that each rank computes for itself, from the values that all others show it.

    So a sum is whole as soon as every rank has launched it, and no rank waits for another to do its part.
    """

    def all_reduce(self, tensor: Tensor) -> Launched:
        """Launch the sum of `tensor` over all ranks, in place. The others see its present values."""
        self.count_launch()
        return self.group.launch_own_sum(tensor.view(-1))  # type: ignore[no-any-return]

    def progress(self) -> None:
        """Compute the sums whose parts all ranks have shown."""
        self.group.progress()
