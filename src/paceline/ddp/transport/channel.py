"""The channel: where one wrapper's collectives travel, apart from every other wrapper's.

With two wrapped models on one group, the order of operations can differ between ranks (a GAN's two backwards, say),
and collectives that pair up by order would mix them. A channel keeps each wrapper's order to itself: a group of its
own.
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

from paceline.comm.registered_memory import RegisteredMemory
from paceline.core.processes.missing_ranks import failed
from paceline.core.processes.nccl_communicators import release
from paceline.core.telemetry.spans import COLLECTIVE, recorder
from paceline.core.torch_internals.distributed.c10d import (
    AllgatherOptions,
    AllreduceOptions,
    ReduceScatterOptions,
    broadcast_coalesced,
    get_known_groups,
)
from paceline.core.torch_internals.tensors import copy_each
from paceline.errors import CommunicationError, PacelineError

Result = TypeVar("Result")
Pausing: TypeAlias = Generator[bool, None, Result]
"""Work at the end of a synchronized backward that launches collectives and later waits for them.

It yields True after a launch, and whoever runs it may first run other wrappers up to their next pause. So all wrappers
of a backward launch before any of them waits, and ranks whose wrappers end in different order do not wait for each
other in a circle. It yields False where it is to be run on only when somebody looks at gradients, as control blocks are
read late. Inside another such function it is run by ``yield from``, which hands its result on.
"""


class Launched(Protocol):
    """A collective under way."""

    def wait(self) -> Any:
        """Return when it is finished."""


@dataclass
class Outstanding:
    """How many collectives were launched and not waited for with success."""

    count: int = 0


class Channel:
    """The collectives of one wrapper; every method is called in the same order on every rank of `group`."""

    blocks = False
    """Whether a launch returns only when every rank has taken part."""

    def __init__(self, group: dist.ProcessGroup, own: Any, memory: RegisteredMemory | None = None) -> None:
        self.rank: int = dist.get_rank(group)
        self.size: int = dist.get_world_size(group)
        self.group = own
        """The group that carries the collectives. torch does not know it, so ``torch.distributed``'s functions, which
        ask torch for a group's backend when they fail, are not called with it."""
        self.members = dist.get_process_group_ranks(group)
        """The ranks of the group, in its order, as messages call them."""
        self.name: str = own.group_name
        self.host: Channel = self
        """Carries what lies in the host's memory; another channel where gradients are on GPUs."""
        self.given = group
        """The group that it was opened for."""
        self._memory = memory  # where tensors on its device are allocated; None for the usual place
        self._process, self._living = os.getpid(), get_known_groups()
        self._options = AllreduceOptions()
        self._options.asyncOp = True
        self._outstanding = Outstanding()
        _channels().add(self)

    def use_host(self, host: Channel) -> None:
        """Let `host` carry what lies in the host's memory. Its collectives may be waited for here as well as there."""
        self.host, host._outstanding = host, self._outstanding

    def check_open(self) -> None:
        """Refuse to begin anything where no one would answer.

        Raises:
            CommunicationError: if the group that the wrapper was made for was destroyed, or this is a forked child.
        """
        if os.getpid() != self._process:
            raise CommunicationError(
                f"rank {self.rank}: this process was forked from a rank, and only the rank itself trains the wrapped "
                "model; call model.module here, or wrap a copy in a process group of the child's own"
            )
        if self.given not in self._living:
            raise CommunicationError(
                f"rank {self.rank}: the process group of this DistributedDataParallel was destroyed; "
                "wrap the model again"
            )

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device | str = "cpu") -> Tensor:
        """A zeroed flat tensor that reductions take best."""
        if self._memory is not None and torch.device(device) == self._memory.device:
            return self._memory.zeros(numel, dtype)
        return torch.zeros(numel, dtype=dtype, device=device)

    def free(self, tensor: Tensor) -> None:
        """Give back what :meth:`allocate` gave."""

    def all_reduce(self, tensor: Tensor) -> Launched:
        """Launch the sum of `tensor` over all ranks, in place."""
        work: dist.Work = self.group.allreduce([tensor], self._options)
        self._outstanding.count += 1
        return work

    def progress(self) -> None:
        """Advance launched operations as far as they go now, without waiting."""

    def broadcast(self, tensors: Sequence[Tensor], source: int = 0) -> None:
        """Make `tensors` equal to those of rank `source`, in place; returns when that is done."""
        if tensors:
            with self.meeting():
                self.run("broadcast", broadcast_coalesced, self.group, tensors, 25 * 2**20, source)

    def reduce_scatter(self, flat: Tensor) -> Launched:
        """Launch the sum of `flat` over all ranks; each gets its own shard, in place; see :meth:`shard`.

        The rest of `flat` is not to be used afterwards.

        Raises:
            ValueError: if the ranks' number does not divide the number of elements.
        """
        options = ReduceScatterOptions()
        options.asyncOp = True
        work: dist.Work = self.group._reduce_scatter_base(self.shard(flat), flat, options)
        self._outstanding.count += 1
        return work

    def reduce_parts(self, flat: Tensor, parts: Sequence[Sequence[slice]]) -> Launched:
        """Launch the sum of `flat` over all ranks; each gets only its own `parts`, in place.

        Args:
            flat: the other parts keep their values; they never get the sum.
            parts: which elements are of each rank, one list for each.
        """
        lengths = [[part.stop - part.start for part in own] for own in parts]
        rows = flat.new_zeros(self.size, max(map(sum, lengths)))  # the backends take shards of one size
        pairs = [
            (place, flat[part])
            for row, own, sizes in zip(rows, parts, lengths, strict=True)
            for place, part in zip(row[: sum(sizes)].split(sizes), own, strict=True)
        ]
        if pairs:
            copy_each([place for place, _ in pairs], [part for _, part in pairs])
        places = rows[self.rank][: sum(lengths[self.rank])].split(lengths[self.rank])
        return _Unpacked(self.reduce_scatter(rows.view(-1)), places, [flat[part] for part in parts[self.rank]])

    def all_gather(self, flat: Tensor) -> Launched:
        """Launch the gathering of every rank's shard of `flat` into all of it, in place.

        Raises:
            ValueError: as in :meth:`reduce_scatter`.
        """
        options = AllgatherOptions()
        options.asyncOp = True
        work: dist.Work = self.group._allgather_base(flat, self.shard(flat), options)
        self._outstanding.count += 1
        return work

    def shard(self, flat: Tensor) -> Tensor:
        """This rank's part of `flat`: the rank-th of as many equal parts as there are ranks; a view."""
        length, rest = divmod(flat.numel(), self.size)
        if rest:
            raise ValueError(f"{flat.numel()} elements cannot be cut into {self.size} equal shards; pad them")
        return flat[self.rank * length : (self.rank + 1) * length]

    def gather_rows(self, row: Tensor) -> tuple[Tensor, Launched]:
        r"""Launch the gathering of every rank's `row`; all have the same shape and dtype, on the CPU.

        Returns:
            A tensor of shape (ranks, *shape of a row), which is whole once the collective is waited for.
        """
        # As a sum to which each rank contributes its own row: every backend has that, and whole numbers stay exact.
        table = torch.zeros(self.size, *row.shape, dtype=row.dtype)
        table[self.rank] = row
        return table, self.host.all_reduce(table)

    def all_gather_object(self, value: Any) -> list[Any]:
        """Every rank's `value`, in the order of ranks."""
        mine = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        sizes, launched = self.gather_rows(torch.tensor(len(mine)))
        self.meet(launched, "all-gather of sizes")
        padded = torch.zeros(int(sizes.max()), dtype=torch.uint8)
        padded[: len(mine)] = mine
        table, launched = self.gather_rows(padded)
        self.meet(launched, "all-gather")
        return [pickle.loads(row[:size].numpy().tobytes()) for row, size in zip(table, sizes.tolist(), strict=True)]

    def count_launch(self) -> None:
        """Count a collective that :meth:`wait` will be called for, launched by another on this channel's group."""
        self._outstanding.count += 1

    def wait(self, launched: Launched, what: str, number: int | None = None) -> None:
        """Wait for a launched collective.

        Raises:
            CommunicationError: if it failed; names `what`, with a `number` if it has one, and this rank.
        """
        try:
            launched.wait()
        except PacelineError:
            raise
        except RuntimeError as error:
            what = what if number is None else f"{what} {number}"
            raise failed(what, self.members, self.members[self.rank], error) from error
        self._outstanding.count -= 1

    def meet(self, launched: Launched, what: str) -> None:
        """Wait as :meth:`wait` does, for a collective that is no part of the wait at the end of a backward."""
        with self.meeting():
            self.wait(launched, what)

    def meeting(self) -> AbstractContextManager[None]:
        """Record the block as a place where the ranks meet."""
        return recorder.span(COLLECTIVE, group=self.name)

    def leave(self, _launched: Launched) -> None:
        """Never wait for a launched collective of host data, without which the channel can be closed."""
        self._outstanding.count -= 1

    def linger(self, launched: Any, seconds: float) -> None:
        """Carry `launched` on until it is finished or failed, for at most so many seconds, without raising."""
        end = time.monotonic() + seconds
        with suppress(Exception):
            while not launched.is_completed() and time.monotonic() < end:
                self.host.progress()
                time.sleep(0.001)

    def run(self, what: str, function: Any, *arguments: Any, **options: Any) -> None:
        """Call a collective; a failure becomes an error that names it."""
        try:
            function(*arguments, **options)
        except PacelineError:
            raise
        except RuntimeError as error:
            raise failed(what, self.members, self.members[self.rank], error) from error

    def close(self) -> None:
        """Give the channel's connections back; those of NCCL when all ranks have done so."""
        if self.host.group is not self.group:  # one group may carry both
            self.host.close()
        if self.group is not None:
            release(self.group, is_clean=self._outstanding.count == 0)

    def join_threads(self) -> None:
        """At the end of the process: let Gloo's threads end, if nothing is under way for which they could wait.

        A work is waited for before the thread that ran it lets go of its tensors. A thread that does so while the
        interpreter ends cannot get the interpreter's lock, and aborts the process.
        """
        is_gloo = self.group is not None and self.group.name() == "gloo"
        if is_gloo and os.getpid() == self._process and self._outstanding.count == 0:
            self.group = None  # its destructor joins them


class _Unpacked:
    """A launched collective whose results are copied to where they belong."""

    def __init__(self, launched: Launched, results: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
        self._launched, self._results, self._targets = launched, list(results), list(targets)

    def wait(self) -> None:
        """Return when they are there, or will be for all later work of the device."""
        self._launched.wait()
        if self._targets:
            copy_each(self._targets, self._results)


@cache
def _channels() -> WeakSet[Channel]:
    """The channels of this process, whose threads end before the interpreter does."""
    channels: WeakSet[Channel] = WeakSet()
    atexit.register(_join_all, channels)
    return channels


def _join_all(channels: WeakSet[Channel]) -> None:
    for channel in list(channels):
        channel.join_threads()
