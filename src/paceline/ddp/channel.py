"""The channel: the collectives of one wrapper, on a separate process group.

With two wrapped models on one group, the order of operations can differ between ranks (for example, with the two
backward passes of a GAN), and collectives, which are matched by order, would mix up the models. With separate groups,
each wrapper's order is independent.

Decision 0004 gives the reasons.
"""

from __future__ import annotations

import logging
import os
import pickle
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from functools import cache, cached_property, partial
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeVar, cast
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import AllreduceOptions

from paceline.comm.own_group import open_own_group
from paceline.core import OWN_BACKEND
from paceline.core.device_streams import is_capturing
from paceline.core.missing_ranks import called_by_all, collective, failed
from paceline.core.nccl_communicators import release
from paceline.core.spans import COLLECTIVE, recorder
from paceline.core.torch_distributed import AllgatherOptions, broadcast_coalesced, get_known_groups
from paceline.errors import CommunicationError, PacelineError

if TYPE_CHECKING:
    from paceline.comm.board import Board
    from paceline.comm.process_group import PacelineProcessGroup

TEST_HOST_CHANNEL = "PACELINE_TEST_HOST_CHANNEL"
"""Environment variable for tests: makes ranks on CPUs open a host channel and report on a board, as with GPUs. With
the value ``always``, they do so even after surprises."""
logger = logging.getLogger(__name__)
SAMPLED = 16
"""One wait of this many is measured on a GPU, because two events per step cost the host 10 microseconds."""
MOST_PENDING = 4
"""Maximum number of measurements not read yet. If the device has reached none of them, the host is far ahead, and no
new one is made."""

Result = TypeVar("Result")
Pausing: TypeAlias = Generator[bool, None, Result]
"""Generator that runs at the end of a synchronized backward pass, launches collectives and waits for them later.

It yields True after a launch, so that the caller can run other wrappers up to their next pause. All wrappers in a
backward pass therefore launch before any of them waits, and ranks whose wrappers end in a different order do not
deadlock. Another such generator runs it with ``yield from``, which returns the result.
"""


def open_channel(group: dist.ProcessGroup, device: torch.device, caller: str = "DistributedDataParallel(…)") -> Channel:
    """Open a channel between the ranks of `group` for gradients on `device`. All ranks call this together."""
    on_cpu = device.type == "cpu"
    # Use the group's own backend, which may differ from the default group's.
    on_nccl = device.type == "cuda" and "nccl" in str(dist.get_backend_config(group))
    backend = "nccl" if on_nccl else dist.get_backend(group)
    timeout = timeout_of(group, device)
    with called_by_all(caller), collective("connection of the ranks", group):
        own_group = open_own_group(group, backend, timeout)
        is_shared = backend == OWN_BACKEND and own_group.native
        channel: Channel
        if on_cpu and is_shared:
            channel = SharedChannel(group, own_group)
        elif on_cpu:
            channel = Channel(group, own_group)
        else:
            channel = DeviceChannel(group, own_group, device)
            channel.is_ordered = on_nccl
        # A Paceline group in shared memory already handles host data, so it needs no second group.
        if not on_cpu or TEST_HOST_CHANNEL in os.environ:
            channel.use_host(_open_host_channel(group, timeout, own_group if is_shared and not on_cpu else None))
    through = "shared memory" if on_cpu and is_shared else f"the group's backend, {backend}"
    logger.info("rank %d: gradients travel through %s", dist.get_rank(group), through)
    return channel


def _open_host_channel(group: dist.ProcessGroup, timeout: timedelta | None, present: Any) -> Channel:
    """Open a channel for control blocks between CPUs, using the group `present` if given."""
    own_group = present or open_host_group(group, timeout)
    logger.info(
        "rank %d: control blocks travel through %s",
        dist.get_rank(group),
        "shared memory" if own_group.native else "Gloo",
    )
    return HostChannel(group, own_group) if own_group.native else Channel(group, own_group)


def open_host_group(group: dist.ProcessGroup, timeout: timedelta | None) -> PacelineProcessGroup:
    """Open a group with the ranks of `group` for host data, using shared memory, or Gloo between hosts."""
    try:
        own_group: PacelineProcessGroup = open_own_group(group, OWN_BACKEND, timeout)
    except CommunicationError as error:
        raise CommunicationError(
            "with gradients on GPUs, ranks exchange control blocks between their CPUs, which requires Gloo over TCP "
            f"between hosts, even if the world was initialized with NCCL alone: {error}"
        ).because_of(error.blamed or ()) from error
    return own_group


def timeout_of(group: dist.ProcessGroup, device: torch.device) -> timedelta | None:
    """Return the group's timeout, which groups created from it do not inherit."""
    if dist.get_backend(group) == OWN_BACKEND:
        return cast("PacelineProcessGroup", group).timeout
    options = getattr(group._get_backend(device), "options", None)
    timeout = getattr(options, "_timeout", None)
    return timeout if isinstance(timeout, timedelta) else None


class Launched(Protocol):
    """A launched collective."""

    def wait(self) -> Any:
        """Return when it is finished."""


@dataclass
class Outstanding:
    """Number of launched collectives whose wait has not succeeded yet; shared with the host channel."""

    count: int = 0


class Channel:
    """The collectives of one wrapper; every method is called in the same order on every rank of `group`."""

    blocks = False
    """Whether a launch returns only when every rank has taken part."""
    advances_in_hooks = False
    """Whether :meth:`progress` has an effect."""
    is_ordered = False
    """Whether the end of a collective implies the end of all earlier ones, as with NCCL, which has one stream."""
    sums_in_tree = False
    """Whether sums are computed by :func:`paceline.comm.arithmetic.reduce_into` on every rank."""

    def __init__(self, group: dist.ProcessGroup, own_group: Any) -> None:
        self.rank: int = dist.get_rank(group)
        self.size: int = dist.get_world_size(group)
        self.group = own_group
        """The group that runs the collectives. It is not registered with torch, so call its methods instead of
        functions of ``torch.distributed``, which look up the group's backend when they report an error."""
        self.members = dist.get_process_group_ranks(group)
        """World ranks of the group's members in group order, for messages."""
        self.name: str = own_group.group_name
        self.host: Channel = self
        """The channel for tensors in host memory; a separate channel if gradients are on GPUs."""
        self.parent_group = group
        """The group that the caller passed when opening the channel."""
        self.living = get_known_groups()
        """torch's own table of groups; destroying a group removes it from the table."""
        self.key: dist.ProcessGroup | None = group
        """The group in that table; None in a forked child."""
        _channels().add(self)
        self._options = AllreduceOptions()  # created once, because each bucket of each step needs it
        self._options.asyncOp = True
        self._averaging = AllreduceOptions()
        self._averaging.asyncOp, self._averaging.reduceOp = True, dist.ReduceOp(dist.ReduceOp.AVG)
        self.outstanding = Outstanding()

    def use_host(self, host: Channel) -> None:
        """Use `host` for tensors in host memory. Either channel can wait for its collectives."""
        self.host, host.outstanding = host, self.outstanding

    def check_open(self) -> None:
        """Raise an error if no other rank would take part in a new collective."""
        if self.key is None:
            raise CommunicationError(
                f"rank {self.rank}: this process was forked from a rank, and only the rank itself can train the "
                "wrapped model; call model.module here, or wrap a copy with the child's own process group"
            )
        if self.parent_group not in self.living:
            raise CommunicationError(
                f"rank {self.rank}: the process group of this DistributedDataParallel was destroyed; "
                "wrap the model again"
            )

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device | str = "cpu") -> Tensor:
        """Allocate a zeroed flat tensor, if possible in memory that reductions use without a copy."""
        return torch.zeros(numel, dtype=dtype, device=device)

    def free(self, tensor: Tensor) -> None:
        """Free a tensor returned by :meth:`allocate`. A no-op if its memory is garbage-collected."""

    def averages(self, dtype: torch.dtype) -> bool:
        """Return whether the backend can average `dtype` with the same bits as our multiplication by 1/N.

        NCCL multiplies by 1/N before the sum, in the tensor's type; in half precision that factor is rounded, unless N
        is a power of two. On one rank, NCCL launches a kernel for an average, but none for a sum.
        """
        is_exact = dtype in (torch.float32, torch.float64) or (dtype.is_floating_point and self.size.bit_count() == 1)
        return self.is_ordered and self.size > 1 and is_exact

    def all_reduce(self, tensor: Tensor, *, averages: bool = False) -> Launched:
        """Launch the sum of `tensor` over all ranks, in place; the mean if :meth:`averages` its dtype."""
        self.outstanding.count += 1
        return self.launcher(tensor, averages=averages)()

    def launcher(self, tensor: Tensor, *, averages: bool = False) -> Callable[[], Launched]:
        """Return a function that does :meth:`all_reduce` in fewer calls, without counting it in :attr:`outstanding`."""
        # The backend itself, because torch's dispatcher, through which the group calls it, takes as long again.
        is_plain = type(self.group) is dist.ProcessGroup
        launches = self.group._get_backend(tensor.device) if is_plain else self.group
        return partial(launches.allreduce, [tensor], self._averaging if averages else self._options)

    def progress(self) -> None:
        """Advance launched operations as far as possible without waiting."""

    @cached_property
    def board(self) -> Board | GatheredBoard:
        """The ranks' reports of each step, sent between CPUs."""
        return GatheredBoard(self)

    def broadcast(self, tensors: Sequence[Tensor], source: int = 0) -> None:
        """Copy `tensors` from rank `source` to every rank; return when the copies are complete."""
        if tensors:
            with self.meeting(), collective("broadcast", self.parent_group):
                broadcast_coalesced(self.group, list(tensors), 25 * 2**20, source)

    def all_gather(self, flat: Tensor) -> Launched:
        """Launch an in-place all-gather of `flat`; every rank contributes its :meth:`shard`."""
        if flat.is_complex():  # Gloo has no all-gather of complex numbers
            flat = torch.view_as_real(flat).view(-1)
        options = AllgatherOptions()
        options.asyncOp = True
        work: dist.Work = self.group._allgather_base(flat, self.shard(flat), options)
        self.outstanding.count += 1
        return work

    def shard(self, flat: Tensor) -> Tensor:
        """Return a view of this rank's part of `flat`, which is divided equally among the ranks."""
        length, rest = divmod(flat.numel(), self.size)
        if rest:
            raise ValueError(f"{flat.numel()} elements cannot be cut into {self.size} equal shards; pad them")
        return flat[self.rank * length : (self.rank + 1) * length]

    def gather_rows(self, row: Tensor) -> tuple[Tensor, Launched]:
        r"""Launch an all-gather of every rank's `row`. Shape, dtype and device type are the same on all ranks.

        Returns:
            A tensor of shape (ranks, \*row.shape), which is complete after waiting for the collective.
        """
        # Sum tables that each have one row filled: every backend supports sums, and integers stay exact.
        table = row.new_zeros(self.size, *row.shape)
        table[self.rank] = row
        return table, (self.host if row.is_cpu else self).all_reduce(table)

    def gathered_rows(self, row: Tensor, label: str) -> Tensor:
        """Return the table of :meth:`gather_rows` once it is complete; `label` names the collective in errors."""
        table, launched = self.gather_rows(row)
        self.meet(launched, label)
        return table

    def gather_numbers(self, numbers: Sequence[int], label: str) -> Pausing[list[list[int]]]:
        """Gather every rank's `numbers` in rank order. All ranks pass equally many; `label` names them in errors."""
        table, launched = self.gather_rows(torch.tensor(numbers, dtype=torch.int64, device="cpu"))
        yield True
        self.meet(launched, label)
        rows: list[list[int]] = table.tolist()
        return rows

    def all_gather_object(self, value: Any) -> list[Any]:
        # torch.distributed.all_gather_object() cannot be used, because the group is not registered with torch.
        local = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        sizes = self.gathered_rows(torch.tensor(len(local), device="cpu"), "all-gather of sizes")
        padded = torch.zeros(int(sizes.max()), dtype=torch.uint8, device="cpu")
        padded[: len(local)] = local
        table = self.gathered_rows(padded, "all-gather")
        return [pickle.loads(row[:size].numpy().tobytes()) for row, size in zip(table, sizes.tolist(), strict=True)]

    def count_launch(self) -> None:
        """Count a collective launched directly on :attr:`group`; :meth:`wait` must be called for it."""
        self.outstanding.count += 1

    def wait(self, launched: Launched, label: str, number: int | None = None) -> None:
        try:
            launched.wait()
        except PacelineError:
            raise
        except RuntimeError as error:
            label = label if number is None else f"{label} {number}"
            raise failed(label, self.members, self.members[self.rank], error) from error
        self.outstanding.count -= 1

    def meet(self, launched: Launched, label: str) -> None:
        """Wait for a collective that is not part of the wait at the end of a backward pass."""
        with self.meeting():
            self.wait(launched, label)

    def meeting(self) -> AbstractContextManager[None]:
        """Return a context manager that records its block as a collective span."""
        return recorder.span(COLLECTIVE, group=self.name)

    def abandon(self, _launched: Launched) -> None:
        """Count a collective on host data as done without waiting. The channel may be closed while it is running."""
        self.outstanding.count -= 1

    def close(self) -> None:
        """Close the channel's connections. NCCL connections close after all ranks have called this."""
        if self.host.group is not self.group:  # both channels may use the same group
            self.host.close()
        if self.group is not None:
            # NCCL destroys a communicator only if all its work has ended, and aborts it otherwise.
            release(self.group, is_clean=self.outstanding.count == 0)


@cache
def _channels() -> WeakSet[Channel]:
    """Return the open channels of this process."""
    channels: WeakSet[Channel] = WeakSet()

    def leave() -> None:
        for channel in list(channels):
            channel.key = None

    os.register_at_fork(after_in_child=leave)
    return channels


class GatheredBoard:
    """A :class:`~paceline.comm.board.Board` for ranks that do not share memory: one small sum per report."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._table = torch.zeros(channel.size, 2, dtype=torch.int64, device="cpu")
        self._launch, self._content = channel.launcher(self._table), 0
        self._launched: Any = None

    def post(self, content: int, weight: float | None = None) -> None:
        """Post this rank's report of the step, and its weight."""
        self.contents()  # of the previous report, if this rank has not read it
        self._content = content
        self._table.zero_()[self._channel.rank, 0] = content
        self._table.view(torch.float64)[self._channel.rank, 1] = weight or 0.0
        self._launched = self._launch()

    def is_unanimous(self) -> bool:
        """Return whether every rank has posted the same; return False if the sum is not complete yet."""
        if self._launched is not None and not self._launched.is_completed():
            return False
        return all(content == self._content for content in self.contents())

    def contents(self) -> list[int]:
        """Return the ranks' contents; waits for the sum."""
        if self._launched is not None:
            self._channel.outstanding.count += 1  # counted only now, because a channel may close before the wait
            self._channel.wait(self._launched, "exchange of reports")
            self._launched = None
        contents: list[int] = self._table[:, 0].tolist()
        return contents

    def weights(self) -> list[float]:
        """Return the ranks' weights, which the sum contains."""
        weights: list[float] = self._table.view(torch.float64)[:, 1].tolist()
        return weights


class DeviceChannel(Channel):
    """A channel for tensors on one type of device; :attr:`host` handles tensors in host memory."""

    def __init__(self, group: dist.ProcessGroup, own_group: Any, device: torch.device) -> None:
        super().__init__(group, own_group)
        self._kind = device.type

    def _carrier_of(self, device: torch.device | str) -> Channel:
        """Return this channel for its own device type, and :attr:`host` for any other."""
        return self if torch.device(device).type == self._kind else self.host

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device | str = "cpu") -> Tensor:
        """Allocate a zeroed flat tensor that its channel uses without a copy."""
        carrier = self._carrier_of(device)
        return super().allocate(numel, dtype, device) if carrier is self else carrier.allocate(numel, dtype, device)

    def free(self, tensor: Tensor) -> None:
        if (carrier := self._carrier_of(tensor.device)) is not self:
            carrier.free(tensor)

    def launcher(self, tensor: Tensor, *, averages: bool = False) -> Callable[[], Launched]:
        """Return a function that launches the sum or mean of `tensor` over all ranks."""
        return self.host.launcher(tensor) if tensor.is_cpu else super().launcher(tensor, averages=averages)

    def broadcast(self, tensors: Sequence[Tensor], source: int = 0) -> None:
        """Copy `tensors` from rank `source` to every rank; return when the copies are complete."""
        super().broadcast([tensor for tensor in tensors if tensor.device.type == self._kind], source)
        self.host.broadcast([tensor for tensor in tensors if tensor.device.type != self._kind], source)


class HostChannel(Channel):
    """A channel through shared memory. Each rank computes sums itself, from the values that all ranks show.

    A sum is therefore complete once every rank has launched it, without waiting for other ranks' results.
    """

    advances_in_hooks = True

    def launcher(self, tensor: Tensor, *, averages: bool = False) -> Callable[[], Launched]:
        """Return a function that launches the sum of `tensor`. The other ranks receive its values at that time."""
        return partial(self.group.launch_own_sum, tensor.view(-1))

    def progress(self) -> None:
        """Compute the sums that all ranks have launched."""
        self.group.progress()

    @cached_property
    def board(self) -> Board:
        """The ranks' reports of each step, in shared memory."""
        board: Board = self.group.board
        return board


class SharedChannel(HostChannel):
    """A channel through shared memory. Backward hooks reduce buckets: small ones from copies, others in place."""

    sums_in_tree = True

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device | str = "cpu") -> Tensor:
        tensor: Tensor = self.group.allocate(numel, dtype)
        return tensor

    def free(self, tensor: Tensor) -> None:
        self.group.free(tensor)

    def launcher(self, tensor: Tensor, *, averages: bool = False) -> Callable[[], Launched]:
        """Return a function that launches the sum of `tensor`.

        Large tensors not returned by :meth:`allocate` are copied there and back.
        """
        if tensor.nbytes <= self.group.small_bytes:
            return super().launcher(tensor)
        return partial(self.group.launch_all_reduce if self.group.holds(tensor) else partial(_CopiedBack, self), tensor)

    def gather(self, tensor: Tensor, places: Sequence[Sequence[tuple[Tensor, slice]]]) -> Launched:
        """Start copying from the other ranks' `tensor`, allocated by :meth:`allocate`, into this rank's tensors.

        Waiting for the result returns once no rank reads from this rank's memory any longer.

        Args:
            tensor: the tensor that other ranks read; it has the same length on every rank.
            places: for each rank, the tensors to copy into, each with the slice of that rank's `tensor` to copy.
        """
        self.count_launch()
        launched: Launched = self.group.launch_gather(tensor, places)
        return launched


class _CopiedBack:
    """A launched reduction of a copy in shared memory, because peers can only read the group's own memory."""

    def __init__(self, channel: SharedChannel, tensor: Tensor) -> None:
        self._channel, self._tensor = channel, tensor
        self._copy: Tensor | None = channel.allocate(tensor.numel(), tensor.dtype)
        self._copy.copy_(tensor.view(-1))
        self._operation = channel.group.launch_all_reduce(self._copy)

    def is_completed(self) -> bool:
        return bool(self._operation.is_completed())

    def wait(self) -> None:
        self._operation.wait()
        if self._copy is not None:
            self._tensor.view(-1).copy_(self._copy)
            self._channel.free(self._copy)
            self._copy = None


class ExposedTime:
    """Adds up the waiting time for gradients on `device`.

    On a CPU, this is host time. A GPU waits while the host continues, so the time is measured between two events on its
    stream, in one wait of :data:`SAMPLED`, which stands for all of them. Events are read after the device has passed
    them, so the host never waits for them, and are then used again.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.of_host: AbstractContextManager[Any] = self if device.type == "cpu" else nullcontext()
        """Measures the host's wait for the other ranks' reports. A no-op with a GPU, which continues meanwhile."""
        self.measured = 0.0
        """Sum of the measurements, in seconds; on a GPU, of those that have been read."""
        self.waits = 0
        """Number of waits on a GPU. The next one is measured if this is a multiple of :data:`SAMPLED`."""
        self._samples = 0  # number of measurements in the sum
        self._begin: Any = None  # time or event at the start of the current wait
        self._pending: deque[tuple[Any, Any]] = deque()  # start and end of unread measurements, oldest first
        self._free: list[tuple[Any, Any]] = []

    @property
    def seconds(self) -> float:
        """Total seconds. On a GPU, an estimate from the measurements that the GPU has finished; 0 before the first."""
        if self.device.type == "cpu":
            return self.measured
        self._read_passed()
        return self.measured / self._samples * self.waits if self._samples else 0.0

    def __enter__(self) -> None:
        self._begin = None
        if self.device.type == "cpu":
            self._begin = time.perf_counter()
        elif not is_capturing(self.device):  # replays of a captured graph do not run this code
            if self.waits % SAMPLED == 0:
                self._read_passed()
                if len(self._pending) < MOST_PENDING:
                    self._begin, self._end = self._free.pop() if self._free else (self._event(), self._event())
                    self._begin.record()
            self.waits += 1

    def __exit__(self, *_: object) -> None:
        if self._begin is None:
            return
        if self.device.type == "cpu":
            self.measured += time.perf_counter() - self._begin
        else:
            self._end.record()
            self._pending.append((self._begin, self._end))

    def _read_passed(self) -> None:
        while self._pending and self._pending[0][1].query():
            begin, end = self._pending.popleft()
            self.measured += begin.elapsed_time(end) / 1000
            self._samples += 1
            self._free.append((begin, end))

    def _event(self) -> Any:
        return torch.Event(device=self.device, enable_timing=True)
