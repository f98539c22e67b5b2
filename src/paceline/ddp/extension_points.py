"""Extensions: handlers for rare cases of a step, which the reducer calls at fixed points.

    check_change     the wrapper is about to switch to the module's changed parameters; this may be refused
    begin_local      an unsynchronized backward pass begins
    begin            a synchronized backward pass begins; it may be refused, because no collective is owed yet
    bucket_ready     a bucket holds this rank's gradients, and is launched next
    backward_ended   backward has ended; the remaining buckets are launched next
    reports_absent   some parameters have no gradient: must this rank report it?
    has_report       all gradients are in their buckets: does this rank have something to report?
    after_averages   in an exchange of control blocks, on all ranks: the sums are available
    show             averages are about to be published in ``p.grad``

All but ``after_averages`` act on this rank alone and may differ between ranks, so they launch no collectives (except
for ``join``, whose events reach all ranks). ``after_averages`` runs on every rank, in the same order and with the same
statuses, even if the extension is not active: it may launch collectives that depend only on the statuses.

For an ordinary model no extension is active, and a step calls none of them.

Decision 0050 gives the reasons.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from paceline.ddp.backward import Backward
from paceline.ddp.buckets import Bucket
from paceline.ddp.channel import Pausing
from paceline.ddp.control_block import ControlBlock, Status


@dataclass(frozen=True)
class Exchanged:
    """The reports of all ranks."""

    control: ControlBlock
    """The sum of all control blocks."""
    statuses: list[Status]
    """Each rank's status."""
    scale: float
    """Factor that turns sums over the ranks into averages."""


class Extension:
    """Handles a rare case of a step. A subclass overrides only the methods it needs; the defaults have no effect."""

    mark_stale: Callable[[], None] = staticmethod(lambda: None)
    """Function to call when the result of :meth:`is_active` changes; set by :class:`Extensions`."""

    def is_active(self) -> bool:
        """Return whether this rank must call the extension; evaluated after changes, not in each backward pass."""
        return True

    def check_change(self) -> None:
        """Raise if the averaged parameters cannot change now; called whether or not the extension is active."""

    def begin_local(self) -> None:
        """Act on the start of a backward pass under ``no_sync``; called whether or not the extension is active."""

    def begin(self, backward: Backward) -> None:
        """Prepare a synchronized backward pass."""

    def bucket_ready(self, backward: Backward, bucket: Bucket) -> None:
        """Inspect a bucket that holds this rank's gradients."""

    def backward_ended(self, backward: Backward) -> None:
        """Act before the remaining buckets are launched."""

    def reports_absent(self, absent: Sequence[int]) -> bool:
        """Return whether this rank must report that the `absent` parameters, at least one, have no gradient."""
        return False

    def has_report(self, backward: Backward) -> bool:
        """Return whether this rank has something to report; if so, note it in `backward`."""
        return False

    def after_averages(self, backward: Backward, exchanged: Exchanged) -> Pausing[None]:
        """Act on the reports of all ranks; may add :attr:`~.Backward.deferred` functions to `backward`."""
        yield from ()

    def show(self, backward: Backward, averages: list[Tensor | None]) -> None:
        """Replace entries of `averages`, one per parameter, that should be published differently."""

    def abort(self, backward: Backward) -> None:
        """Undo :meth:`begin`, because `backward` was refused, or an exception or a failed collective ended it."""

    def parameters_changed(self) -> None:
        """Adapt to the wrapper's new set of averaged parameters."""

    def close(self) -> None:
        """Drop references to the wrapper, which no longer exists."""


class Extensions:
    """The extensions of one wrapper, grouped by the point at which they are called; at first there are none."""

    all: Sequence[Extension]
    """The extensions, in call order."""
    begin: Sequence[Callable[[Backward], None]]
    bucket_ready: Sequence[Callable[[Backward, Bucket], None]]
    backward_ended: Sequence[Callable[[Backward], None]]
    reports_absent: Sequence[Callable[[Sequence[int]], bool]]
    has_report: Sequence[Callable[[Backward], bool]]
    show: Sequence[Callable[[Backward, list[Tensor | None]], None]]
    """The methods of active extensions for each point. For an ordinary model all are empty except ``reports_absent``,
    which is called only if gradients are absent."""
    after_averages: Sequence[Callable[[Backward, Exchanged], Pausing[None]]]
    """The methods of all extensions, active or not, because one may be active on some ranks only."""
    is_stale = True
    """Whether :meth:`refresh` must run before the next backward pass; it never runs during one."""

    def __init__(self) -> None:
        self.use(())

    def use(self, extensions: Sequence[Extension]) -> None:
        """Call `extensions` from now on, in this order."""
        self.all = extensions
        self.after_averages = _methods(extensions, "after_averages")
        for extension in extensions:
            extension.mark_stale = self._mark_stale
        self.refresh()

    def refresh(self) -> None:
        active = [extension for extension in self.all if extension.is_active()]
        for moment in ("begin", "bucket_ready", "backward_ended", "reports_absent", "has_report", "show"):
            setattr(self, moment, _methods(active, moment))
        self.is_stale = False

    def _mark_stale(self) -> None:
        # Do not refresh now, because extensions may also detect changes during a backward pass, which uses the tuples.
        self.is_stale = True

    def abort(self, backward: Backward) -> None:
        """Undo every extension's preparations for `backward`."""
        for extension in self.all:
            extension.abort(backward)

    def parameters_changed(self) -> None:
        for extension in self.all:
            extension.parameters_changed()
        self.is_stale = True

    def close(self) -> None:
        """Tell all extensions that the wrapper no longer exists."""
        for extension in self.all:
            extension.close()
            del extension.mark_stale  # it references this object
        self.use(())


def _methods(extensions: Sequence[Extension], name: str) -> tuple[Any, ...]:
    general = getattr(Extension, name)
    return tuple(getattr(extension, name) for extension in extensions if getattr(type(extension), name) is not general)
