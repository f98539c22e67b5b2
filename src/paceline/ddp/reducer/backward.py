"""State of one synchronized backward pass, and its phases."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from enum import Enum
from functools import partial
from types import MappingProxyType
from typing import Any

from torch import Tensor

from paceline.ddp.transport.channel import Launched, Pausing
from paceline.errors import PacelineError


class Phase(Enum):
    """Phase of a backward pass; :data:`NEXT` lists the phases that may follow each one."""

    LAUNCHING = "gradients arrive, complete buckets are launched"
    WAITING = "everything is launched, results are awaited"
    UNREAD = "averages are published, the other ranks' control blocks are not read yet"
    ABORTED = "an exception ended backward; collectives that the other ranks wait for are still owed"
    BROKEN = "a collective or a communication hook failed"
    OVER = "averages are published, and ranks agree"


NEXT = {
    Phase.LAUNCHING: {Phase.WAITING, Phase.ABORTED, Phase.BROKEN},
    Phase.WAITING: {Phase.OVER, Phase.UNREAD, Phase.ABORTED, Phase.BROKEN},
    Phase.UNREAD: {Phase.WAITING, Phase.BROKEN},
    Phase.ABORTED: {Phase.LAUNCHING, Phase.WAITING},  # when the owed collectives run
    Phase.BROKEN: set[Phase](),
    Phase.OVER: set[Phase](),
}
_NONE: Mapping[int, Any] = MappingProxyType({})


class Backward:
    """One synchronized backward pass of one wrapper on this rank, from the first gradient to the averages.

    Attributes that matter only in rare cases have their default value on the class, so that a step creates few objects.

    Args:
        sends_block: whether all ranks launch control blocks at the end of the backward pass, regardless of the digests.
        launches_at_end: whether buckets are launched when backward has ended rather than as they fill.
    """

    phase = Phase.LAUNCHING
    """The current phase; only :meth:`enter` changes it."""
    grads_were_none = True
    """Whether every ``p.grad`` was None at the beginning, so that this backward pass produced all gradients."""
    owns_all_grads = True
    """Whether, in addition, no other wrapper averages any of these gradients in this backward pass."""
    is_traced = False
    """Whether a span is recorded for each bucket."""
    buckets_unreferenced = False
    """Whether no user held a reference to the buckets' memory when backward began. This stays true until averages are
    published, because until then no ``p.grad`` is a bucket view."""
    is_shared = False
    """Whether other wrappers also have some of the parameters."""
    reads_in_backward = False
    """Whether control blocks are read before backward ends, even with GPUs."""
    launches_at_end: bool
    """Whether buckets are launched when backward has ended rather than as they fill."""
    averaged_elsewhere: Collection[int] = frozenset()
    """Parameters whose gradients another wrapper averages in this backward pass; our buckets hold zeros for them."""
    launched: list[Launched]
    """The collectives of the buckets, in the order of launch."""
    absent: Sequence[int] = ()
    """Parameters without a gradient on this rank."""
    saved_gradients: Mapping[int, Tensor] = _NONE
    """Gradients from before backward, by parameter, that have been copied into launched buckets. They are restored to
    ``p.grad`` if an exception ends backward."""
    sparse_in_buckets: Sequence[int] = ()
    """Parameters with a place in a bucket but a sparse gradient; zeros were launched for them."""
    out_of_bucket: Mapping[int, Tensor] = _NONE
    """This rank's gradients outside buckets, by parameter: late deltas and sparse gradients."""
    late: Sequence[int] = ()
    """Parameters with a late delta: a gradient that arrived after its bucket was launched."""
    sparse: Sequence[int] = ()
    """Parameters with a sparse gradient."""
    non_finite: Sequence[int] = ()
    """Parameters whose gradient on this rank contains NaN or Inf, if the check is on."""
    has_report = False
    """Whether an extension has something to report to the other ranks; set only if buckets carry no digest."""
    block: Launched | None = None
    """The control block, from its launch until it has been waited for."""
    exchange: Pausing[None] | None = None
    """The exchange of control blocks at the end of backward; None in an ordinary step."""
    out_of_bucket_averages: Mapping[int, Tensor] = _NONE
    """Averages of all ranks' :attr:`out_of_bucket` gradients that are not bucket views, by parameter."""
    deferred: Sequence[Callable[[], None]] = ()
    """Functions to call in order once averages are published, which may raise an error on all ranks; not called if an
    exception has ended backward."""
    is_cut_short = False
    """Whether an exception ended backward before everything was launched; the control block reports it."""
    is_resyncing = False
    """Whether this backward pass is being completed after an exception, which the user has already seen."""
    task: weakref.ref[Any] | None = None
    """Weak reference to a callback that lives exactly as long as autograd's graph task. None without a task
    (``sync_gradients()``) and after backward has ended."""
    task_number = -1
    """Number of the graph task."""

    def __init__(self, *, sends_block: bool, launches_at_end: bool = False) -> None:
        self.sends_block, self.launches_at_end = sends_block, launches_at_end
        self.launched = []

    def enter(self, phase: Phase) -> None:
        if phase not in NEXT[self.phase]:
            raise AssertionError(f"a backward pass cannot go from {self.phase.name} to {phase.name}")
        self.phase = phase

    @property
    def is_under_way(self) -> bool:
        """Whether this backward pass has neither ended nor failed."""
        return self.phase in (Phase.LAUNCHING, Phase.WAITING)

    def defer(self, function: Callable[[], None]) -> None:
        """Call `function` once averages are published, after the functions deferred before it."""
        # A new list, because all backward passes share the class's default.
        self.deferred = [*self.deferred, function]

    def defer_error(self, error: PacelineError) -> None:
        self.defer(partial(_raise, error))

    def end_arrival_span(self) -> None:
        """End the span that covers the gradients' arrival; replaced on the instance if a span was opened."""


def _raise(error: PacelineError) -> None:
    raise error
