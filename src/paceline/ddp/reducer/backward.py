"""One synchronized backward: the object that the reducer's stages hand on, and its phases."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from enum import Enum
from types import MappingProxyType
from typing import Any

from torch import Tensor

from paceline.ddp.transport.channel import Launched, Pausing


class Phase(Enum):
    """The phase of a backward; :data:`NEXT` lists those that may follow each."""

    LAUNCHING = "gradients arrive, complete buckets are launched"
    WAITING = "everything is launched, results are waited for"
    UNREAD = "averages are shown, the other ranks' control blocks are not read yet"
    ABORTED = "an exception ended backward; what the other ranks count on is still owed"
    BROKEN = "a collective failed"
    OVER = "averages are shown, and ranks agree"


NEXT = {
    Phase.LAUNCHING: {Phase.WAITING, Phase.ABORTED, Phase.BROKEN},
    Phase.WAITING: {Phase.OVER, Phase.UNREAD, Phase.ABORTED, Phase.BROKEN},
    Phase.UNREAD: {Phase.WAITING, Phase.BROKEN},
    Phase.ABORTED: {Phase.LAUNCHING, Phase.WAITING},  # when what is owed is carried out
    Phase.BROKEN: set[Phase](),
    Phase.OVER: {Phase.BROKEN},  # where new parameters could not be taken in
}
_NONE: Mapping[int, Any] = MappingProxyType({})


class Backward:
    """One synchronized backward of one wrapper on this rank, from its first gradient to the averages.

    An attribute that matters in a rare case alone has its usual value on the class, so that a step makes few objects.

    Args:
        sends_block: whether control blocks are launched at the end of backward, on all ranks, whatever digests say.
        at_end: whether buckets are launched when backward has ended rather than as they fill.
    """

    phase = Phase.LAUNCHING
    """Changed by :meth:`enter` alone."""
    cleared = True
    """Whether no parameter had a gradient when it began, so that one that is there was made by it."""
    is_plain = True
    """Whether moreover all of them are this wrapper's to average."""
    is_traced = False
    """Whether spans of each bucket are recorded."""
    unreferenced = False
    """Whether nobody referred to gradients in the buckets when it began; nor does anybody since, because no parameter
    has shown any."""
    is_shared = False
    """Whether other wrappers have some of the parameters, too."""
    reads_at_once = False
    """Whether control blocks are read before backward ends, also beside a GPU."""
    launches_at_end: bool
    """Whether buckets are launched when backward has ended rather than as they fill."""
    elsewhere: Collection[int] = frozenset()
    """Parameters whose gradients another wrapper averages in this backward; no bucket of ours takes them."""
    launched: list[Launched]
    """The collectives of the buckets, in the order of launch."""
    absent: Sequence[int] = ()
    """Parameters for which this rank had no gradient."""
    held: Mapping[int, Tensor] = _NONE
    """Gradients that were there before, and were launched; they come back if an exception ends backward."""
    sparse_in_buckets: Sequence[int] = ()
    """Parameters in buckets whose gradient was found to be sparse, so that zeros were launched."""
    apart: Mapping[int, Tensor] = _NONE
    """This rank's gradients that are in no bucket, by parameter: late deltas and sparse gradients."""
    late: Sequence[int] = ()
    """Parameters with a late delta: a gradient that came after its bucket was launched."""
    sparse: Sequence[int] = ()
    """Parameters with a sparse gradient."""
    non_finite: Sequence[int] = ()
    """Parameters whose gradient on this rank holds NaN or Inf, where that is looked for."""
    has_new: bool = False
    """Whether this rank has a gradient of a parameter that came into the module after it was wrapped."""
    block: Launched | None = None
    """The control block, once it is launched and until it is read."""
    exchange: Pausing[None] | None = None
    """The part of the end of backward in which control blocks are exchanged; None in an ordinary step."""
    averages_apart: Mapping[int, Tensor] = _NONE
    """Averages that are in no bucket, by parameter."""
    findings: Sequence[Callable[[], None]] = ()
    """Called in order once averages are shown, such as to raise an error on all ranks; unless backward was aborted."""
    last: Sequence[Callable[[], None]] = ()
    """The same, after all of these."""
    is_cut_short = False
    """Whether an exception ended it before all was launched, which the control block tells the other ranks."""
    is_settling = False
    """Whether it is carried to its end after an exception, which the user has seen."""
    task: weakref.ref[Any] | None = None
    """Dies with autograd's graph task; None without one, as in ``sync_gradients()``, and when backward has ended."""
    task_number = -1
    """That of the graph task."""
    turns = 0
    """How often it went on after its launches, where several wrappers take turns."""

    def __init__(self, *, sends_block: bool, at_end: bool = False) -> None:
        self.sends_block, self.launches_at_end = sends_block, at_end
        self.launched = []

    def enter(self, phase: Phase) -> None:
        """Go on to `phase`."""
        if phase not in NEXT[self.phase]:
            raise AssertionError(f"a backward that is {self.phase.name} cannot become {phase.name}")
        self.phase = phase

    @property
    def is_under_way(self) -> bool:
        """Whether it has neither come to its end nor failed."""
        return self.phase in (Phase.LAUNCHING, Phase.WAITING)

    def find(self, finding: Callable[[], None]) -> None:
        """Call `finding` when averages are shown, after those before it."""
        self.findings = [*self.findings, finding]

    def gradients_came(self) -> None:
        """End the span of the gradients' arrival; replaced where a span was opened."""
