"""Extensions: the rare cases of a step, which the reducer calls at named moments.

    forward_ended    a forward has ended
    look_at_module   a backward begins: has the module changed?
    stays_local      a backward begins that is not synchronized
    begin            a synchronized backward begins; it may be refused, as nothing is owed to peers yet
    bucket_ready     a bucket holds this rank's gradients, and is launched next
    at_end           backward has ended; what is left is launched next
    has_report       all gradients are in their buckets: does this rank have to tell the others something?
    after_averages   in an exchange of control blocks, on all ranks: the sums are there
    show             averages are about to be shown in ``p.grad``

All but ``after_averages`` act on this rank alone, may differ between ranks, and so launch nothing (but for ``join``,
whose events all ranks meet). ``after_averages`` runs on every rank, in one order, with the same statuses, also where
the extension is not active there: it may launch where the statuses say so.

For an ordinary model no extension is active, and a step calls none but that which looks at the module.

Decision 0050 says why.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from paceline.core.state.buckets import Bucket
from paceline.ddp.agreement.control_block import ControlBlock, Status
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
    """One rare case. A subclass has those methods that it needs; the others do nothing."""

    changed: Callable[[], None] = staticmethod(lambda: None)
    """To be called when :meth:`is_active` gives another answer; set by :class:`Extensions`."""

    def is_active(self) -> bool:
        """Whether it has to be called on this rank; asked when something has changed, not in each backward."""
        return True

    def forward_ended(self) -> None:
        """A forward has ended; called whether it is active or not."""

    def look_at_module(self) -> None:
        """A backward begins; called whether it is active or not, maybe several times."""

    def stays_local(self) -> None:
        """A backward begins under ``no_sync``; called whether it is active or not.

        Raises:
            UsageError: if it cannot be right.
        """

    def claims_gradients(self) -> bool:
        """Whether a gradient that comes outside of this wrapper's backwards is another one's."""
        return False

    def begin(self, backward: Backward) -> None:
        """A synchronized backward begins.

        Raises:
            PacelineError: if it cannot be carried out.
        """

    def bucket_ready(self, backward: Backward, bucket: Bucket) -> None:
        """A bucket holds this rank's gradients."""

    def at_end(self, backward: Backward) -> None:
        """Backward has ended."""

    def has_report(self, backward: Backward) -> bool:
        """Whether this rank has something to report, as far as this case goes."""
        return False

    def after_averages(self, backward: Backward, exchanged: Exchanged) -> Pausing[None]:
        """Act on the reports of all ranks; `backward` may get :attr:`~.Backward.findings`."""
        yield from ()

    def show(self, backward: Backward, averages: list[Tensor | None]) -> None:
        """Replace `averages` that are to be shown otherwise, by parameter."""

    def abort(self, backward: Backward) -> None:
        """An exception or a failed collective has ended `backward`, or it was refused: undo what :meth:`begin` did."""

    def renew(self) -> None:
        """The wrapper averages other parameters from now on."""

    def close(self) -> None:
        """The wrapper is gone."""


class Extensions:
    """The extensions of one wrapper, by moment.

    Args:
        extensions: in the order in which they are called.
    """

    begin: Sequence[Callable[[Backward], None]]
    bucket_ready: Sequence[Callable[[Backward, Bucket], None]]
    at_end: Sequence[Callable[[Backward], None]]
    has_report: Sequence[Callable[[Backward], bool]]
    show: Sequence[Callable[[Backward, list[Tensor | None]], None]]
    """The methods of those that are active; empty for an ordinary model."""
    after_averages: Sequence[Callable[[Backward, Exchanged], Pausing[None]]]
    """The same of all extensions, because it may differ between ranks which are active."""
    forward_ended: Sequence[Callable[[], None]]
    look_at_module: Sequence[Callable[[], None]]
    """The same of all extensions, which so find out whether they are active."""
    is_stale = True
    """Whether :meth:`refresh` is due, before the next backward begins; never during one."""

    def __init__(self, extensions: Sequence[Extension]) -> None:
        self.all = extensions
        self.after_averages = _methods(extensions, "after_averages")
        self.forward_ended = _methods(extensions, "forward_ended")
        self.look_at_module = _methods(extensions, "look_at_module")
        for extension in extensions:
            extension.changed = self._changed
        self.refresh()

    def refresh(self) -> None:
        """Ask each extension whether it is active."""
        active = [extension for extension in self.all if extension.is_active()]
        for moment in ("begin", "bucket_ready", "at_end", "has_report", "show"):
            setattr(self, moment, _methods(active, moment))
        self.is_stale = False

    def _changed(self) -> None:
        self.is_stale = True

    def abort(self, backward: Backward) -> None:
        """Put back what extensions changed at the beginning of `backward`."""
        for extension in self.all:
            extension.abort(backward)

    def renew(self) -> None:
        """Tell all of them that the wrapper averages other parameters."""
        for extension in self.all:
            extension.renew()
        self.is_stale = True

    def close(self) -> None:
        """Tell all of them that the wrapper is gone."""
        for extension in self.all:
            extension.close()
            del extension.changed  # it refers back to this object


def _methods(extensions: Sequence[Extension], name: str) -> tuple[Any, ...]:
    """Return the method `name` of each that has one of its own."""
    general = getattr(Extension, name)
    return tuple(getattr(each, name) for each in extensions if getattr(type(each), name) is not general)
