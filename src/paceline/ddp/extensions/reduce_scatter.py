"""A reduce-scatter in place of a bucket's all-reduce: each rank gets the averages of the pieces that it owns, no more.

A sharded optimizer chooses it. Among ranks of a network it moves half of the bytes of an all-reduce (Rajbhandari et
al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", SC 2020). In ``p.grad`` lies a stand-in
(:mod:`.scattered_gradients`), because no rank has the whole average.

Decision 0043 says why.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from functools import cache, partial
from typing import Protocol

import torch.distributed as dist
from torch import Tensor

from paceline.comm.shm.operation import Operation
from paceline.core.state.buckets import Bucket, joined
from paceline.core.telemetry.spans import BucketWatch, Recorder
from paceline.core.torch_internals.distributed.c10d import ReduceScatterOptions
from paceline.core.torch_internals.empty_tensor import made_like
from paceline.core.torch_internals.tensors import copy_each
from paceline.ddp.agreement.ledger import Ledger
from paceline.ddp.consistency.trained import Trained
from paceline.ddp.extensions.scattered_gradients import ScatteredGradient
from paceline.ddp.reducer.reducer import Reducer
from paceline.ddp.transport.channel import Channel, Launched
from paceline.ddp.transport.finisher import AllReduce
from paceline.ddp.transport.shared_channel import SharedChannel
from paceline.errors import UsageError


class Plan(Protocol):
    """The pieces of parameters and their owners, the same on every rank."""

    version: int
    """A number that changes whenever the plan does."""

    def pieces_of(self, key: int) -> Sequence[tuple[int, int, int]] | None:
        """Return (start, stop, owner) of each piece of the parameter with that ``id``; None if it is not sharded.

        In elements as they lie in memory. A parameter that is sharded is kept alive.
        """


def check_scatterable(reducers: Sequence[Reducer], ranks: int) -> None:
    """Refuse to scatter gradients if there are no `reducers`, or if one of them does not use an all-reduce.

    Raises:
        UsageError: unless there is one rank alone.
    """
    for reducer in reducers:
        finisher = reducer.finisher
        if reducer.virtual_ranks:
            raise UsageError(
                "reduce_scatter=True sums and clips in an order that depends on the number of ranks; leave it out with "
                f"virtual_ranks={reducer.virtual_ranks}"
            )
        if finisher.owner and not isinstance(finisher, ReduceScatter):
            raise UsageError(
                f"reduce_scatter=True takes the place of the wrapper's all-reduce, for which {finisher.owner} has been "
                "chosen; leave one of them out"
            )
    if ranks > 1 and not reducers:
        raise UsageError(
            "reduce_scatter=True needs paceline.DistributedDataParallel, as others average whole gradients; wrap the "
            "model with it first, or leave reduce_scatter out"
        )


def scatter_gradients(reducer: Reducer, plan: Plan | None) -> None:
    """Give each rank the averages of its own pieces alone, which `plan` tells; whole ones if it is None.

    All ranks call it, with a plan after :func:`check_scatterable`.
    """
    ledger = reducer.ledger
    if plan is not None:
        trained = reducer.trained
        reducer.use_finisher(lambda channel, recorder: ReduceScatter(plan, trained, channel, ledger, recorder))
    elif isinstance(reducer.finisher, ReduceScatter):  # an earlier optimizer of this model chose it
        reducer.use_finisher(partial(AllReduce, ledger=ledger))


class ReduceScatter(AllReduce):
    """Reduce-scatters the buckets whose parameters `plan` cuts, and all-reduces the others.

    Args:
        plan: the owners of all pieces.
        trained: the parameters, in the order of the indices in buckets.
        channel: the wrapper's channel.
        ledger: the wrapper's ledger.
        recorder: the wrapper's recorder.
    """

    owner = "the ShardedOptimizer that was made with reduce_scatter=True"
    reads_late = False
    is_capturable = False
    """The host makes the stand-ins."""

    def __init__(self, plan: Plan, trained: Trained, channel: Channel, ledger: Ledger, recorder: Recorder) -> None:
        super().__init__(channel, recorder, ledger)
        self.carries_tail = False  # no rank would have all of it after a reduce-scatter
        self.channel = channel
        self._plan, self._trained = plan, trained
        self._layouts: dict[int, tuple[list[int], int, list[list[slice]] | None]] = {}
        """Parameters of each bucket, by its number, with the plan's version and the elements that each rank owns."""
        self._parts: dict[int, list[slice] | None] = {}
        """This rank's part of each bucket of this backward, by the bucket's ``id``; None if it is all-reduced."""
        self._stand_ins: dict[int, ScatteredGradient] = {}
        """Stand-in of each parameter, which is used again unless somebody has kept it."""

    def check_shared(self, name: str) -> None:
        """Refuse a backward in which one part of the gradient of `name` is scattered, and another is not."""
        raise UsageError(
            f"one backward runs through two DistributedDataParallel that share {name!r}, and a ShardedOptimizer with "
            "reduce_scatter=True gets a part of its gradient from one of them alone; leave reduce_scatter out"
        )

    def _reduce(self, bucket: Bucket, number: int) -> Launched:
        parts = self._parts_of(bucket, number)
        self._parts[id(bucket)] = None if parts is None else parts[self.channel.rank]
        if parts is None:
            return super()._reduce(bucket, number)
        return launch_reduce_scatter(self.channel, bucket.flat, parts)

    def _parts_of(self, bucket: Bucket, number: int) -> list[list[slice]] | None:
        """Return which elements of the bucket each rank owns; None for a bucket that has to be all-reduced."""
        everything = self._trained.originals
        parameters = [everything[index] for index in bucket.indices]
        # The plan counts elements as they lie in the parameter's memory, which must be their order in the bucket, too.
        if not bucket.flat.numel() or any(
            view.stride() != each.stride() for view, each in zip(bucket.views, parameters, strict=True)
        ):
            return None
        indices, version, parts = self._layouts.get(number, (None, None, None))
        if indices is not bucket.indices or version != self._plan.version:
            parts = self._cut(parameters)
            self._layouts[number] = (bucket.indices, self._plan.version, parts)
        return parts

    def _cut(self, parameters: Sequence[Tensor]) -> list[list[slice]] | None:
        ranges: list[list[tuple[int, int]]] = [[] for _ in range(self.channel.size)]
        offset = 0
        for parameter in parameters:
            pieces = self._plan.pieces_of(id(parameter))
            if pieces is None:  # it is not sharded, so every rank needs the whole average
                return None
            for start, stop, owner in pieces:
                ranges[owner].append((offset + start, offset + stop))
            offset += parameter.numel()
        return [[slice(*each) for each in joined(own)] for own in ranges]

    def _show_averages(self, watch: BucketWatch, buckets: Sequence[Bucket]) -> None:
        """Show nothing: averages are not whole."""

    def _averaged(self, buckets: Sequence[Bucket]) -> list[Tensor]:
        pairs = [(bucket, self._parts.get(id(bucket))) for bucket in buckets]
        return [
            tensor
            for bucket, own in pairs
            for tensor in ([bucket.flat] if own is None else [bucket.flat[part] for part in own])
        ]

    def stand_ins(self, buckets: Sequence[Bucket]) -> Mapping[int, Tensor]:
        """Return the stand-ins shown in ``p.grad`` where no rank has the whole average."""
        shown: dict[int, Tensor] = {}
        for bucket in buckets:
            if self._parts.get(id(bucket)) is not None:
                for index, view in zip(bucket.indices, bucket.views, strict=True):
                    shown[index] = self._stand_in(index, view)
        self._parts.clear()
        return shown

    def _stand_in(self, index: int, view: Tensor) -> ScatteredGradient:
        parameter = self._trained.originals[index]
        found = self._stand_ins.get(index)
        if found is not None and found.key != id(parameter):  # the module has other parameters than before
            found = None
        # One that somebody keeps is not used again: it would show him another gradient than the one that he kept.
        is_free = found is not None and sys.getrefcount(found) <= _own_count() and parameter.grad is not found
        if found is None or not is_free or _form(found) != _form(parameter):
            if found is not None:
                found.stand_for(None)
            found = self._stand_ins[index] = made_like(ScatteredGradient, parameter)
            found.home, found.key = self, id(parameter)
        found.stand_for(view)
        return found

    def own_pieces(self, key: int) -> list[tuple[int, int]]:
        """Return start and stop of this rank's pieces of a parameter; see :meth:`ScatteredGradient.own_pieces`."""
        pieces = self._plan.pieces_of(key) or ()
        return [(start, stop) for start, stop, owner in pieces if owner == self.channel.rank]


@cache
def _own_count() -> int:
    """Return the count of ``sys.getrefcount`` for a stand-in that only its finisher refers to, in this Python."""
    stand_ins = {0: object()}
    found = stand_ins.get(0)
    return sys.getrefcount(found)


def _form(tensor: Tensor) -> tuple[object, ...]:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device


# -- the collective ------------------------------------------------------------------------------------------------


def launch_reduce_scatter(channel: Channel, flat: Tensor, parts: Sequence[Sequence[slice]]) -> Launched:
    """Launch the sum of `flat` over all ranks; each rank gets its own `parts` alone, in place.

    Args:
        channel: reaches the other ranks, counts the collective, and waits for it.
        flat: a tensor that the channel has allocated. Do not read the rest of it afterwards.
        parts: the elements of each rank, one list for each.
    """
    carrier = channel.carrier_of(flat.device)
    if isinstance(carrier, SharedChannel):
        carrier.count_launch()
        operation: Operation = carrier.group.launch_reduce_scatter(flat, parts)
        return operation
    if carrier is not channel:
        return carrier.all_reduce(flat)  # in the host's memory beside a GPU: more than was asked for, and rare
    return _PackedReduceScatter(channel, flat, parts)


class _PackedReduceScatter:
    """A reduce-scatter of a backend, whose shards have one size: pieces are packed into rows, one for each rank."""

    def __init__(self, channel: Channel, flat: Tensor, parts: Sequence[Sequence[slice]]) -> None:
        lengths = [[part.stop - part.start for part in own] for own in parts]
        rows = flat.new_zeros(channel.size, max(map(sum, lengths)))
        places = [row[: sum(sizes)].split(sizes) for row, sizes in zip(rows, lengths, strict=True)]
        pieces = [[flat[part] for part in own] for own in parts]
        if any(pieces):
            copy_each([place for own in places for place in own], [piece for own in pieces for piece in own])
        self._results, self._targets = list(places[channel.rank]), pieces[channel.rank]
        options = ReduceScatterOptions()
        options.asyncOp = True
        packed = rows.view(-1)
        self._work: dist.Work = channel.group._reduce_scatter_base(channel.shard(packed), packed, options)
        channel.count_launch()

    def wait(self) -> None:
        """Return when this rank's pieces are summed in place, or will be for all later work of the device."""
        self._work.wait()
        if self._targets:
            copy_each(self._targets, self._results)
