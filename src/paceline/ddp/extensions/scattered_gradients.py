"""Reduce-scatter in place of a bucket's all-reduce: each rank gets the averages of the pieces that it owns, no more.

So there is no gradient that anybody could look at. In ``p.grad`` lies a stand-in that refuses to be read, and that a
sharded optimizer and :func:`paceline.clip_grad_norm_` know how to use. Among ranks of a network it moves half of what
an all-reduce does (Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", SC
2020).
"""

from __future__ import annotations

import math
import sys
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, reduce
from typing import Any, Protocol

import torch
from torch import Tensor

from paceline.core.state.buckets import Bucket, flattened, joined
from paceline.core.telemetry.spans import BucketWatch, Recorder
from paceline.core.torch_internals.empty_tensor import disabled_torch_function, made_like
from paceline.ddp.agreement.ledger import Ledger
from paceline.ddp.reducer.gradient_views import StandIn
from paceline.ddp.transport.channel import Channel, Launched
from paceline.ddp.transport.finisher import AllReduce
from paceline.errors import UsageError


class Plan(Protocol):
    """Which rank owns which elements of a parameter, the same on every rank."""

    version: int
    """Changes when it does."""

    def pieces_of(self, key: int) -> Sequence[tuple[int, int, int]] | None:
        """Return (start, stop, owner) of each piece of the parameter with that ``id``; None if it is not sharded.

        In elements as they lie in memory. A parameter that is sharded is kept alive.
        """


class ScatteredGradient(StandIn):
    """Stands in ``p.grad`` for a gradient that this rank has only in pieces.

    Whatever reads or changes it raises UsageError.
    """

    home: Scatter
    """Made it."""
    key: int
    """The ``id`` of the parameter whose gradient it stands for, which the plan keeps alive."""
    _memory: Callable[[], Tensor | None]
    """Returns the place in the bucket, to which users of it alone refer; None when it is there no more."""

    __torch_function__ = disabled_torch_function

    @classmethod
    def __torch_dispatch__(cls, operation: Any, *_: Any, **__: Any) -> Any:  # type: ignore[override]
        """Refuse the operation.

        Raises:
            UsageError: always.
        """
        raise UsageError(
            f"{operation} was called on a gradient of which each rank has a part alone, as the ShardedOptimizer was "
            "made with reduce_scatter=True; call optimizer.zero_grad() before the next backward, without "
            "set_to_none=False, clip with paceline.clip_grad_norm_(model, …), and leave reduce_scatter out where "
            "anything else reads p.grad"
        )

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"ScatteredGradient(shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device})"

    def stand_for(self, view: Tensor | None) -> None:
        """Stand for what lies in `view`, from now on; None for nothing any more."""
        self._memory = (lambda: None) if view is None else weakref.ref(view)

    def hold_memory(self) -> None:
        """Keep the memory, which the bucket is about to leave."""
        view = self._memory()
        self._memory = lambda: view

    def lies_in(self, view: Tensor) -> bool:
        """Whether it stands for what lies in `view`."""
        return self._memory() is view

    def memory(self) -> Tensor:
        """Return the bucket's memory for it, in which this rank's pieces are averages, and the rest is no gradient.

        Raises:
            UsageError: if another backward has come since.
        """
        memory = self._memory()
        if memory is None:
            raise UsageError(
                "p.grad holds the stand-in for a gradient of an earlier backward, of which nothing is left; keep no "
                "gradients from before a backward when a ShardedOptimizer has reduce_scatter=True"
            )
        return memory

    def own_pieces(self) -> list[tuple[int, int]]:
        """Return from where to where this rank's pieces go, in elements as they lie in memory."""
        return self.home.own_pieces(self.key)

    def averages(self) -> list[Tensor]:
        """Return this rank's pieces, flat; views. Raises what :meth:`memory` raises."""
        flat = flattened(self.memory())
        return [flat[start:stop] for start, stop in self.own_pieces()]


class Scatter(AllReduce):
    """Reduce-scatters the buckets whose parameters `plan` cuts; the others are all-reduced.

    Args:
        plan: who owns what.
        parameters: returns the parameters that indices in buckets are of.
        channel: of the wrapper.
        ledger: of the wrapper.
        recorder: of the wrapper.
    """

    owner = "the ShardedOptimizer that was made with reduce_scatter=True"
    reads_late = False

    def __init__(
        self,
        plan: Plan,
        parameters: Callable[[], Sequence[Tensor]],
        channel: Channel,
        ledger: Ledger,
        recorder: Recorder,
    ) -> None:
        super().__init__(channel, ledger, recorder)
        self.carries_tail = False  # of a bucket that is scattered no rank has it all
        self.channel = channel
        self._plan, self._parameters = plan, parameters
        self._layouts: dict[int, tuple[list[int], int, list[list[slice]] | None]] = {}
        """By the number of a bucket: its parameters, the plan's version, and which elements of it each rank owns."""
        self._parts: dict[int, list[slice] | None] = {}
        """This rank's part of each bucket of this backward, by the bucket's address; None if it is all-reduced."""
        self._stand_ins: dict[int, ScatteredGradient] = {}
        """By parameter; used again unless somebody has kept one."""

    @property
    def is_capturable(self) -> bool:
        """Never: the host makes the stand-ins."""
        return False

    def check_shared(self, name: str) -> None:
        """Refuse it: a part of the gradient is scattered, and another is not."""
        raise UsageError(
            f"one backward runs through two DistributedDataParallel that share {name!r}, and a ShardedOptimizer with "
            "reduce_scatter=True gets a part of its gradient from one of them alone; leave reduce_scatter out"
        )

    def _reduce(self, bucket: Bucket, at: int) -> Launched:
        parts = self._parts_of(bucket, at)
        self._parts[id(bucket)] = None if parts is None else parts[self.channel.rank]
        if parts is None:
            return super()._reduce(bucket, at)
        return self.channel.reduce_parts(bucket.flat, parts)

    def _parts_of(self, bucket: Bucket, at: int) -> list[list[slice]] | None:
        """Return which elements of the bucket each rank owns; None for none, no one's, or those in another order."""
        everything = self._parameters()
        parameters = [everything[index] for index in bucket.indices]
        if not bucket.flat.numel() or any(
            view.stride() != each.stride() for view, each in zip(bucket.views, parameters, strict=True)
        ):
            return None
        indices, version, parts = self._layouts.get(at, (None, None, None))
        if indices is not bucket.indices or version != self._plan.version:
            parts = self._cut(parameters)
            self._layouts[at] = (bucket.indices, self._plan.version, parts)
        return parts

    def _cut(self, parameters: Sequence[Tensor]) -> list[list[slice]] | None:
        ranges: list[list[tuple[int, int]]] = [[] for _ in range(self.channel.size)]
        offset = 0
        for parameter in parameters:
            pieces = self._plan.pieces_of(id(parameter))
            if pieces is None:
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
        parameter = self._parameters()[index]
        found = self._stand_ins.get(index)
        if found is not None and found.key != id(parameter):  # the module has got others since
            found = None
        is_free = found is not None and sys.getrefcount(found) <= _ours_alone() and parameter.grad is not found
        if found is None or not is_free or _form(found) != _form(parameter):
            if found is not None:
                found.stand_for(None)  # whoever keeps it learns that its memory holds something else
            found = self._stand_ins[index] = made_like(ScatteredGradient, parameter)
            found.home, found.key = self, id(parameter)
        found.stand_for(view)
        return found

    def own_pieces(self, key: int) -> list[tuple[int, int]]:
        """Return from where to where this rank's pieces of a parameter go; see :meth:`ScatteredGradient.own_pieces`."""
        pieces = self._plan.pieces_of(key) or ()
        return [(start, stop) for start, stop, owner in pieces if owner == self.channel.rank]


@cache
def _ours_alone() -> int:
    """Return the count of ``sys.getrefcount`` for a stand-in to which no one but its finisher refers."""
    stand_ins = {0: object()}
    found = stand_ins.get(0)
    return sys.getrefcount(found)


def _form(tensor: Tensor) -> tuple[object, ...]:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device


def is_scattered(gradient: Tensor | None) -> bool:
    """Whether it stands in for a gradient that each rank has only in pieces."""
    return isinstance(gradient, ScatteredGradient)


@torch.no_grad()
def clip_scattered(gradients: Iterable[Tensor], max_norm: float, norm_type: float, error_if_nonfinite: bool) -> Tensor:
    """Clip `gradients`, some of them scattered, as ``torch.nn.utils.clip_grad_norm_`` does; all ranks call it.

    The norm is that over all ranks' pieces: the same on every rank, and but for rounding that of whole gradients.

    Raises:
        UsageError: if they are of several wrappers.
        RuntimeError: with `error_if_nonfinite`, if the norm is NaN or Inf, on every rank.
    """
    scattered = [each for each in gradients if isinstance(each, ScatteredGradient)]
    whole = [each for each in gradients if not isinstance(each, ScatteredGradient)]
    channels = {each.home.channel for each in scattered}
    if len(channels) != 1:
        raise UsageError("clip_grad_norm_ got the scattered gradients of several wrappers; clip those of one at a time")
    channel = channels.pop()
    pairs = [(piece, each.dtype) for each in scattered for piece in each.averages()]
    pieces = [piece for piece, _ in pairs]
    device = scattered[0].device
    shown = [piece.to(dtype) for piece, dtype in pairs]  # not in the dtype of the buckets, which may be a narrower one
    own = torch.nn.utils.get_total_norm(shown, norm_type).to("cpu", torch.float64) if shown else torch.zeros(())
    rows, launched = channel.gather_rows(own.to(torch.float64))
    channel.meet(launched, "all-gather of the norms of scattered gradients")
    norms = list(rows)
    if whole:
        norms.append(torch.nn.utils.get_total_norm(whole, norm_type).to("cpu", torch.float64))
    dtype = reduce(torch.promote_types, (each.dtype for each in (*scattered, *whole)), torch.float32)
    total: Tensor = torch.linalg.vector_norm(torch.stack(norms), norm_type).to(device, dtype)
    if error_if_nonfinite and not math.isfinite(float(total)):
        raise RuntimeError(
            f"the total norm of order {norm_type} of the gradients is {float(total)}, so they cannot be clipped; pass "
            "error_if_nonfinite=False to go on"
        )
    factor = (max_norm / (total + 1e-6)).clamp(max=1.0)
    for each in [*pieces, *whole]:
        each.mul_(factor.to(each.device))
    return total
