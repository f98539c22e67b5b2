"""Collectives of ranks on several hosts: inside each host through shared memory, between hosts over Gloo.

    host 0: ranks 0 1      reduce-scatter inside:  every rank holds the host's sum of its own shard
    host 1: ranks 2 3      across, 0 with 2 and 1 with 3:  the hosts' sums, in the order of hosts
                           all-gather inside:  every rank has all shards

Each byte crosses the network once for a host, not once for a rank, and all ranks of a host send at the same time. What
comes from the other hosts is added here, not by Gloo, whose ring adds in an order that depends on where in the tensor
an element lies: so results do not depend on the layout of buckets, and all dtypes and reductions work.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from paceline.comm.arithmetic import reduce_into
from paceline.comm.shm.collectives import Collectives
from paceline.errors import PacelineError
from paceline.rollcall import failed
from paceline.torch_internals.c10d import AllgatherOptions, AllToAllOptions, BarrierOptions, BroadcastOptions

CHUNK_BYTES = 8 * 2**20
"""Bytes that are reduced at once; while one chunk is on the network, the next is reduced inside."""
UNDER_WAY = 2
_SMALL_BYTES = 64 * 1024
"""Shards up to this size are sent whole to every host: one round trip instead of two."""


class Hierarchy:
    """The collectives of ranks of several hosts, equally many on each, with :class:`Collectives`' interface."""

    def __init__(self, inside: Collectives, across: Any, rows: Sequence[Sequence[int]], names: Sequence[int]) -> None:
        """Combine the collectives of this host with those of the ranks in this rank's place, host by host.

        Args:
            inside: the collectives of this host.
            across: a Gloo group of the ranks in this rank's place on every host.
            rows: the ranks of each host.
            names: messages call rank r ``names[r]``.
        """
        self._inside, self._across = inside, across
        self._rows, self._names = rows, names
        self._host = across.rank()
        """The index of this host in `rows`, which is this rank's place in `across`."""
        self.rank = rows[self._host][inside.place]
        self.size = sum(map(len, rows))

    def all_reduce(self, tensor: Tensor, op: ReduceOp.RedOpType) -> None:
        """Reduce `tensor` over all ranks, in place."""
        hosts, places = len(self._rows), self._inside.size
        unit = hosts * places
        length = max(unit, CHUNK_BYTES // tensor.dtype.itemsize // unit * unit)
        under_way: deque[Callable[[], None]] = deque()
        for start in range(0, max(1, tensor.numel()), length):
            if len(under_way) == UNDER_WAY:
                under_way.popleft()()
            under_way.append(self._begin_chunk(tensor[start : start + length], op, unit))
        while under_way:
            under_way.popleft()()

    def _begin_chunk(self, chunk: Tensor, op: ReduceOp.RedOpType, unit: int) -> Callable[[], None]:
        """Reduce `chunk` inside and start to send this rank's shard; returns a function that does the rest."""
        places = self._inside.size
        count = chunk.numel()
        padded = chunk
        if count % unit:
            padded = chunk.new_zeros(-(-count // unit) * unit)
            padded[:count].copy_(chunk)
        pieces = list(padded.view(places, -1))
        shard = torch.empty_like(pieces[0])
        self._inside.reduce_scatter(shard, pieces, _plain(op))
        finish_exchange = self._begin_exchange(shard, op)

        def finish() -> None:
            finish_exchange()
            self._inside.all_gather(pieces, shard)
            if padded is not chunk:
                chunk.copy_(padded[:count])

        return finish

    def _begin_exchange(self, shard: Tensor, op: ReduceOp.RedOpType) -> Callable[[], None]:
        """Start to reduce `shard` over the hosts; returns a function that waits for it and adds."""
        hosts = len(self._rows)
        scale = 1 / self.size if op is ReduceOp.AVG else None
        if hosts == 2 or shard.numel() * shard.element_size() <= _SMALL_BYTES:
            everyone = shard.new_empty(hosts, shard.numel())
            wait = self._gather_across(everyone, shard)

            def add() -> None:
                wait()
                reduce_into([shard], list(everyone), _plain(op), scale)

            return add

        parts = torch.empty_like(shard)
        options = AllToAllOptions()
        wait_for_parts = self._start(
            "reduction", self._across.alltoall_base, _bytes(parts), _bytes(shard), [], [], options
        )

        def add_and_share() -> None:
            wait_for_parts()
            total = shard.new_empty(shard.numel() // hosts)
            reduce_into([total], list(parts.view(hosts, -1)), _plain(op), scale)
            self._gather_across(shard, total)()

        return add_and_share

    def broadcast(self, tensor: Tensor, root: int) -> None:
        """Make `tensor` equal to that of rank `root`: across to its host's like, then inside every host."""
        host = next(number for number, row in enumerate(self._rows) if root in row)
        place = list(self._rows[host]).index(root)
        if self._inside.place == place and tensor.numel():
            options = BroadcastOptions()
            options.rootRank = host
            self._start("broadcast", self._across.broadcast, [_bytes(tensor)], options)()
        self._inside.broadcast(tensor, place)

    def all_gather(self, outputs: Sequence[Tensor], tensor: Tensor) -> None:
        """Copy every rank's `tensor` into `outputs`, in the order of ranks."""
        everyone = tensor.new_empty(len(self._rows), tensor.numel())
        self._gather_across(everyone, tensor)()
        for row, tensors in zip(self._rows, everyone, strict=True):
            self._inside.all_gather([outputs[rank] for rank in row], tensors)

    def reduce_scatter(self, output: Tensor, inputs: Sequence[Tensor], op: ReduceOp.RedOpType) -> None:
        """Reduce over all ranks their input number `rank`, into `output`."""
        sums = output.new_empty(len(self._rows), output.numel())
        for row, total in zip(self._rows, sums, strict=True):
            self._inside.reduce_scatter(total, [inputs[rank] for rank in row], _plain(op))
        parts = torch.empty_like(sums)
        if output.numel():
            options = AllToAllOptions()
            exchange = self._across.alltoall_base
            self._start("reduce-scatter", exchange, _bytes(parts), _bytes(sums), [], [], options)()
        reduce_into([output], list(parts), _plain(op), 1 / self.size if op is ReduceOp.AVG else None)

    def barrier(self) -> None:
        """Wait until every rank has come here: all of this host, then all hosts."""
        self._inside.barrier()
        self._start("barrier", self._across.barrier, BarrierOptions())()

    # -- across hosts -------------------------------------------------------------------------------------------

    def _gather_across(self, everyone: Tensor, tensor: Tensor) -> Callable[[], None]:
        """Start to collect every host's `tensor`; returns a function that waits."""
        if tensor.numel() == 0:
            return lambda: None
        gather = self._across._allgather_base
        return self._start("all-gather", gather, _bytes(everyone), _bytes(tensor), AllgatherOptions())

    def _start(self, collective: str, function: Callable[..., Any], *arguments: Any) -> Callable[[], None]:
        """Begin one of Gloo's collectives; returns a function that waits for it."""

        def guarded(call: Callable[[], Any]) -> Any:
            try:
                return call()
            except PacelineError:
                raise
            except RuntimeError as error:
                raise failed(f"{collective} between hosts", self._names, self._names[self.rank], error) from error

        work = guarded(lambda: function(*arguments))
        return lambda: guarded(work.wait)


def _plain(op: ReduceOp.RedOpType) -> ReduceOp.RedOpType:
    """Return the reduction without its scaling: an average is a sum that is scaled at the very end."""
    return ReduceOp.SUM if op is ReduceOp.AVG else op


def _bytes(tensor: Tensor) -> Tensor:
    """View a contiguous tensor as bytes, which Gloo carries for every dtype."""
    return tensor.view(-1).view(torch.uint8)
