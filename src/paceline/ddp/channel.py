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
from collections.abc import Generator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeVar, cast

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
    from paceline.comm.process_group import PacelineProcessGroup

TEST_HOST_CHANNEL = "PACELINE_TEST_HOST_CHANNEL"
"""Environment variable for tests: makes ranks on CPUs open a host channel and read control blocks late, as with GPUs.
With the value ``always``, blocks are read late even after surprises."""
logger = logging.getLogger(__name__)
MOST_PENDING = 64
"""Maximum number of measurements not read yet. If the device has reached none of them, the host is far ahead and makes
no new ones, so that events do not accumulate."""

Result = TypeVar("Result")
Pausing: TypeAlias = Generator[bool, None, Result]
"""Generator that runs at the end of a synchronized backward pass, launches collectives and waits for them later.

It yields True after a launch, so that the caller can run other wrappers up to their next pause. All wrappers in a
backward pass therefore launch before any of them waits, and ranks whose wrappers end in a different order do not
deadlock. It yields False if control blocks are read late: the caller then continues when gradients are accessed next.
Another such generator runs it with ``yield from``, which returns the result.
"""


def open_channel(
    group: dist.ProcessGroup,
    device: torch.device,
    caller: str = "DistributedDataParallel(…)",
) -> Channel:
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
        # torch's own table of groups; destroying a group removes it from the table.
        self._process, self._living = os.getpid(), get_known_groups()
        self._options = AllreduceOptions()  # created once, because each bucket of each step needs it
        self._options.asyncOp = True
        self._outstanding = Outstanding()

    def use_host(self, host: Channel) -> None:
        """Use `host` for tensors in host memory. Either channel can wait for its collectives."""
        self.host, host._outstanding = host, self._outstanding

    def check_open(self) -> None:
        """Raise an error if no other rank would take part in a new collective."""
        if os.getpid() != self._process:
            raise CommunicationError(
                f"rank {self.rank}: this process was forked from a rank, and only the rank itself can train the "
                "wrapped model; call model.module here, or wrap a copy with the child's own process group"
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
        """Free a tensor returned by :meth:`allocate`. A no-op if its memory is garbage-collected."""

    def all_reduce(self, tensor: Tensor) -> Launched:
        """Launch the sum of `tensor` over all ranks, in place."""
        work: dist.Work = self.group.allreduce([tensor], self._options)
        self._outstanding.count += 1
        return work

    def progress(self) -> None:
        """Advance launched operations as far as possible without waiting."""

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
        self._outstanding.count += 1
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
        self._outstanding.count += 1

    def wait(self, launched: Launched, label: str, number: int | None = None) -> None:
        try:
            launched.wait()
        except PacelineError:
            raise
        except RuntimeError as error:
            label = label if number is None else f"{label} {number}"
            raise failed(label, self.members, self.members[self.rank], error) from error
        self._outstanding.count -= 1

    def meet(self, launched: Launched, label: str) -> None:
        """Wait for a collective that is not part of the wait at the end of a backward pass."""
        with self.meeting():
            self.wait(launched, label)

    def meeting(self) -> AbstractContextManager[None]:
        """Return a context manager that records its block as a collective span."""
        return recorder.span(COLLECTIVE, group=self.name)

    def abandon(self, _launched: Launched) -> None:
        """Count a collective on host data as done without waiting. The channel may be closed while it is running."""
        self._outstanding.count -= 1

    def close(self) -> None:
        """Close the channel's connections. NCCL connections close after all ranks have called this."""
        if self.host.group is not self.group:  # both channels may use the same group
            self.host.close()
        if self.group is not None:
            # NCCL destroys a communicator only if all its work has ended, and aborts it otherwise.
            release(self.group, is_clean=self._outstanding.count == 0)


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

    def all_reduce(self, tensor: Tensor) -> Launched:
        """Launch the sum of `tensor` over all ranks, in place."""
        # Do not call _carrier_of(), because creating a device object takes a tenth of the time of a launch.
        return self.host.all_reduce(tensor) if tensor.is_cpu else Channel.all_reduce(self, tensor)

    def broadcast(self, tensors: Sequence[Tensor], source: int = 0) -> None:
        """Copy `tensors` from rank `source` to every rank; return when the copies are complete."""
        super().broadcast([tensor for tensor in tensors if tensor.device.type == self._kind], source)
        self.host.broadcast([tensor for tensor in tensors if tensor.device.type != self._kind], source)


class HostChannel(Channel):
    """A channel through shared memory. Each rank computes sums itself, from the values that all ranks show.

    A sum is therefore complete once every rank has launched it, without waiting for other ranks' results.
    """

    def all_reduce(self, tensor: Tensor) -> Launched:
        """Launch the sum of `tensor` over all ranks, in place. The other ranks receive its current values."""
        self.count_launch()
        return self.group.launch_own_sum(tensor.view(-1))  # type: ignore[no-any-return]

    def progress(self) -> None:
        """Compute the sums that all ranks have launched."""
        self.group.progress()


class SharedChannel(HostChannel):
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
        if tensor.nbytes <= self.group.small_bytes:
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
    stream. Events are read in batches after the device has passed them, so the host never waits for them. Reading two
    events in every step would take several times as long as recording them.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.of_host: AbstractContextManager[Any] = self if device.type == "cpu" else nullcontext()
        """Measures the host's wait for the other ranks' reports. A no-op with a GPU, which continues meanwhile."""
        self._read = 0.0  # sum of the measurements read so far
        self._begin: Any = None  # time or event at the start of the current wait
        self._pending: deque[tuple[Any, Any]] = deque()  # start and end of unread measurements, oldest first

    @property
    def seconds(self) -> float:
        """Total seconds. On a GPU, the latest steps may be missing, because the GPU may not have finished them."""
        self._read_passed()
        return self._read

    def __enter__(self) -> None:
        if self.device.type == "cpu":
            self._begin = time.perf_counter()
        elif is_capturing(self.device) or self._is_far_ahead():
            self._begin = None  # replays of a captured graph do not run this code
        else:
            self._begin = self._event()
            self._begin.record()

    def __exit__(self, *_: object) -> None:
        if self.device.type == "cpu":
            self._read += time.perf_counter() - self._begin
        elif self._begin is not None:
            end = self._event()
            end.record()
            self._pending.append((self._begin, end))

    def _read_passed(self) -> None:
        while self._pending and self._pending[0][1].query():
            begin, end = self._pending.popleft()
            self._read += begin.elapsed_time(end) / 1000

    def _is_far_ahead(self) -> bool:
        if len(self._pending) < MOST_PENDING:
            return False
        self._read_passed()
        return len(self._pending) >= MOST_PENDING

    def _event(self) -> Any:
        return torch.Event(device=self.device, enable_timing=True)
