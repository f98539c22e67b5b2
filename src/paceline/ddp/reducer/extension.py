"""Extensions: the rare cases of a step, which the reducer calls at named moments.

    check_change     the module has other parameters, which the wrapper is about to take in; this may be refused
    begin_local      a backward begins that is not synchronized
    begin            a synchronized backward begins; it may be refused, because no collective is owed yet
    bucket_ready     a bucket holds this rank's gradients, and is launched next
    backward_ended   backward has ended; the buckets that are left are launched next
    has_report       all gradients are in their buckets: does this rank have something to report?
    after_averages   in an exchange of control blocks, on all ranks: the sums are there
    show             averages are about to be shown in ``p.grad``

All but ``after_averages`` act on this rank alone, may differ between ranks, and so launch no collective (except for
``join``, whose events all ranks meet). ``after_averages`` runs on every rank, in one order, with the same statuses,
even if the extension is not active: it may launch collectives that depend only on the statuses.

For an ordinary model no extension is active, and a step calls none of them.

Decision 0050 says why.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from paceline.ddp.agreement.control_block import ControlBlock, Status
from paceline.ddp.options.buckets import Bucket
from paceline.ddp.reducer.backward import Backward
from paceline.ddp.transport.channel import Pausing


@dataclass(frozen=True)
class Exchanged:
    """The reports of all ranks."""

    control: ControlBlock
    """The sum of all control blocks."""
    statuses: list[Status]
    """Each rank's status."""
    scale: float
    """The factor of sums over the ranks."""


class Extension:
    """One rare case. A subclass overrides the methods that it needs; the others are empty."""

    mark_stale: Callable[[], None] = staticmethod(lambda: None)
    """Function to call when :meth:`is_active` gives another answer than before; set by :class:`Extensions`."""

    def is_active(self) -> bool:
        """Return whether it has to be called on this rank; asked after a change, not in each backward."""
        return True

    def check_change(self) -> None:
        """Refuse to average other parameters from now on, if they cannot be taken in here; called in any case."""

    def begin_local(self) -> None:
        """Act on the beginning of a backward under ``no_sync``; called whether it is active or not."""

    def other_wrapper_in_backward(self) -> bool:
        """Return whether a gradient that comes outside of this wrapper's backwards belongs to another wrapper's."""
        return False

    def begin(self, backward: Backward) -> None:
        """Prepare a synchronized backward."""

    def bucket_ready(self, backward: Backward, bucket: Bucket) -> None:
        """Look at a bucket, which holds this rank's gradients."""

    def backward_ended(self, backward: Backward) -> None:
        """Act before the buckets that are left are launched."""

    def has_report(self, backward: Backward) -> bool:
        """Return whether this rank has something to report in this case, and note it in `backward`."""
        return False

    def after_averages(self, backward: Backward, exchanged: Exchanged) -> Pausing[None]:
        """Act on the reports of all ranks; `backward` may get :attr:`~.Backward.deferred` functions."""
        yield from ()

    def show(self, backward: Backward, averages: list[Tensor | None]) -> None:
        """Replace `averages` that should be shown differently, by parameter."""

    def abort(self, backward: Backward) -> None:
        """Undo the changes of :meth:`begin`: `backward` was refused, or an exception or a failed collective ends it."""

    def parameters_changed(self) -> None:
        """Follow the wrapper, which averages other parameters from now on."""

    def close(self) -> None:
        """Drop references to the wrapper, which is gone."""


class Extensions:
    """The extensions of one wrapper, by moment.

    Args:
        extensions: in the order of their calls.
    """

    begin: Sequence[Callable[[Backward], None]]
    bucket_ready: Sequence[Callable[[Backward, Bucket], None]]
    backward_ended: Sequence[Callable[[Backward], None]]
    has_report: Sequence[Callable[[Backward], bool]]
    show: Sequence[Callable[[Backward, list[Tensor | None]], None]]
    """The methods of active extensions for each moment; empty for an ordinary model."""
    after_averages: Sequence[Callable[[Backward, Exchanged], Pausing[None]]]
    """The methods of all extensions, because they may be active on some ranks only."""
    is_stale = True
    """Whether :meth:`refresh` is due, before the next backward begins; never during one."""

    def __init__(self, extensions: Sequence[Extension]) -> None:
        self.all = extensions
        self.after_averages = _methods(extensions, "after_averages")
        for extension in extensions:
            extension.mark_stale = self._mark_stale
        self.refresh()

    def refresh(self) -> None:
        active = [extension for extension in self.all if extension.is_active()]
        for moment in ("begin", "bucket_ready", "backward_ended", "has_report", "show"):
            setattr(self, moment, _methods(active, moment))
        self.is_stale = False

    def _mark_stale(self) -> None:
        # Not refreshed at once: extensions also find changes during a backward, when the tuples are in use.
        self.is_stale = True

    def abort(self, backward: Backward) -> None:
        """Undo the changes that extensions made at the beginning of `backward`."""
        for extension in self.all:
            extension.abort(backward)

    def parameters_changed(self) -> None:
        for extension in self.all:
            extension.parameters_changed()
        self.is_stale = True

    def close(self) -> None:
        """Tell all of them that the wrapper is gone."""
        for extension in self.all:
            extension.close()
            del extension.mark_stale  # it refers back to this object


def _methods(extensions: Sequence[Extension], name: str) -> tuple[Any, ...]:
    general = getattr(Extension, name)
    return tuple(getattr(each, name) for each in extensions if getattr(type(each), name) is not general)
