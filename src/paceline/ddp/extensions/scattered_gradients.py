"""Scattered gradients: stand-ins in ``p.grad`` for averages that each rank has only in pieces.

A stand-in refuses to be read, because there is no gradient that anybody could look at. A sharded optimizer and
:func:`paceline.clip_grad_norm_` know how to use its pieces. :mod:`.reduce_scatter` makes them.

Decision 0043 says why.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable
from functools import reduce
from typing import Any, Protocol

import torch
from torch import Tensor

from paceline.core.state.buckets import flattened
from paceline.core.torch_internals.empty_tensor import disabled_torch_function
from paceline.ddp.reducer.gradient_views import StandIn
from paceline.ddp.transport.channel import Channel
from paceline.errors import UsageError


class Home(Protocol):
    """The finisher that made a stand-in."""

    channel: Channel
    """The wrapper's channel."""

    def own_pieces(self, key: int) -> list[tuple[int, int]]:
        """Return start and stop of this rank's pieces of the parameter with that ``id``."""


class ScatteredGradient(StandIn):
    """Stands in ``p.grad`` for a gradient that this rank has only in pieces.

    Every operation that reads or changes it raises UsageError.
    """

    home: Home
    """The finisher that made it."""
    key: int
    """The ``id`` of the parameter whose gradient it stands for, which the plan keeps alive."""
    _memory: Callable[[], Tensor | None]
    """Function that returns the bucket view; None when that is gone. Weak, because a strong reference would count as
    a user of the bucket's memory, and make the next backward leave it."""

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
        """Stand for the gradient in `view` from now on; for no gradient if it is None."""
        self._memory = (lambda: None) if view is None else weakref.ref(view)

    def hold_memory(self) -> None:
        """Keep alive the memory, which the bucket is about to leave."""
        view = self._memory()
        self._memory = lambda: view

    def lies_in(self, view: Tensor) -> bool:
        """Return whether it stands for the gradient in `view`."""
        return self._memory() is view

    def memory(self) -> Tensor:
        """Return the bucket view, in which this rank's pieces are averages, and the rest is no gradient.

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
        """Return start and stop of this rank's pieces, in elements as they lie in memory."""
        return self.home.own_pieces(self.key)

    def averages(self) -> list[Tensor]:
        """Return this rank's pieces, as flat views.

        Raises:
            UsageError: if another backward has come since.
        """
        flat = flattened(self.memory())
        return [flat[start:stop] for start, stop in self.own_pieces()]


def is_scattered(gradient: Tensor | None) -> bool:
    """Return whether `gradient` stands in for one that each rank has only in pieces."""
    return isinstance(gradient, ScatteredGradient)


@torch.no_grad()
def clip_scattered(gradients: Iterable[Tensor], max_norm: float, norm_type: float, error_if_nonfinite: bool) -> Tensor:
    """Clip `gradients`, some of them scattered, as ``torch.nn.utils.clip_grad_norm_`` does; all ranks call it.

    The norm is that over all ranks' pieces. It is the same on every rank, and that of whole gradients but for rounding.

    Raises:
        UsageError: if the gradients are of several wrappers.
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
    # In the parameters' dtypes, because that of the buckets may be narrower.
    shown = [piece.to(dtype) for piece, dtype in pairs]
    own = torch.nn.utils.get_total_norm(shown, norm_type).to("cpu", torch.float64) if shown else torch.zeros(())
    rows, launched = channel.gather_rows(own.to(torch.float64))
    channel.meet(launched, "all-gather of the norms of scattered gradients")
    norms = list(rows)
    if whole:  # these are equal on all ranks, so each adds their norm once, without communication
        norms.append(torch.nn.utils.get_total_norm(whole, norm_type).to("cpu", torch.float64))
    dtype = reduce(torch.promote_types, (each.dtype for each in (*scattered, *whole)), torch.float32)
    total: Tensor = torch.linalg.vector_norm(torch.stack(norms), norm_type).to(device, dtype)
    if error_if_nonfinite and not math.isfinite(float(total)):
        raise RuntimeError(
            f"the total norm of order {norm_type} of the gradients is {float(total)}, so they cannot be clipped; pass "
            "error_if_nonfinite=False to go on"
        )
    # As in torch: without a branch on the norm, which would make the host wait for a GPU.
    factor = (max_norm / (total + 1e-6)).clamp(max=1.0)
    for each in [*pieces, *whole]:
        each.mul_(factor.to(each.device))
    return total
