"""Parameters that several live wrappers have in common: an actor's and a critic's body, or a model wrapped again.

:mod:`.sharing` has the rules. Decision 0020 says why.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from torch import Tensor

from paceline.ddp.extensions.sharing import NOTHING_SHARED, Sharing
from paceline.ddp.reducer.backward import Backward
from paceline.ddp.reducer.extension import Extension
from paceline.ddp.reducer.reducer import Reducer


class SharedParameters(Extension):
    """Makes a reducer average common parameters once, and add its averages to those of other wrappers.

    Args:
        reducer: the wrapper's reducer.
        check_shared: called with the name of a parameter that another wrapper averages in the same backward; raises if
            that cannot be exact.
    """

    def __init__(self, reducer: Reducer, check_shared: Callable[[str], None]) -> None:
        self._reducer, self._check_shared = reducer, check_shared
        self._share = NOTHING_SHARED
        self._make_sharing()

    def _make_sharing(self) -> None:
        trained, channel = self._reducer.trained, self._reducer.channel
        self._sharing = Sharing(
            trained.names,
            trained.originals,
            trained.parameters,
            self._reducer.ledger,
            channel.members,
            self._note_partners,
        )
        self._reducer.averages.left_to_others = self._left_to_others
        self._note_partners()

    def _note_partners(self) -> None:
        self._reducer.common = self._sharing.common
        self.mark_stale()

    def _left_to_others(self) -> Collection[int]:
        return self._sharing.left_to_others

    def is_active(self) -> bool:
        """Return whether another live wrapper has parameters of this one."""
        return bool(self._sharing)

    def other_wrapper_in_backward(self) -> bool:
        """Return whether a wrapper with common parameters is in a backward."""
        return self._sharing.is_partner_active

    def begin_local(self) -> None:
        """Refuse a weighted backward that would be added to another wrapper's average."""
        self._sharing.check_no_average()

    def begin(self, backward: Backward) -> None:
        """Decide who averages each parameter, and set aside others' averages, before gradients are looked at."""
        self._share = NOTHING_SHARED
        self._share = share = self._sharing.begin()
        backward.is_shared, backward.averaged_elsewhere = True, share.averaged_elsewhere.keys()
        if share.averaged_elsewhere:
            self._check_shared(self._reducer.trained.names[min(share.averaged_elsewhere)])

    def has_report(self, backward: Backward) -> bool:
        """Note for the other wrappers which common parameters lack a gradient here; always makes ranks exchange."""
        if not self._sharing:  # a wrapper that was collected has not called _note_partners()
            self._note_partners()
        for index in self._sharing.common & backward.out_of_bucket.keys():
            # This backward holds it now; in p.grad another wrapper would take it for its own.
            self._reducer.trained.parameters[index].grad = None
        # Averaged by another wrapper, but absent there, too: only then may the parameter end as None.
        lacking = [index for index in self._share.averaged_elsewhere if self._sharing.lacks(index, self._share)]
        backward.absent = [*backward.absent, *lacking]
        self._sharing.note_absent(backward.absent)
        return True

    def show(self, backward: Backward, averages: list[Tensor | None]) -> None:
        """Add the averages of common parameters to those of other wrappers."""
        parameters = self._reducer.trained.parameters
        common = self._sharing.common | self._share.set_aside.keys()  # other wrappers may have gone since
        self._sharing.show({index: averages[index] for index in common}, self._share)
        for index in common:
            averages[index] = parameters[index].grad
        # It remembers the gradients that are shown, so it comes after buckets may have got other memory, with the order
        # of arrival; and first of the deferred functions, because one of the others may raise.
        backward.deferred = [self._end, *backward.deferred]

    def _end(self) -> None:
        self._sharing.end()
        self._share = NOTHING_SHARED

    def abort(self, backward: Backward) -> None:
        """Put back the averages that were set aside."""
        self._sharing.abort(self._share)
        self._share = NOTHING_SHARED

    def parameters_changed(self) -> None:
        """Find the new parameters that other wrappers have, too."""
        self._sharing.close()
        self._make_sharing()
        self._sharing.end()  # gradients that are there now are averages of this wrapper

    def close(self) -> None:
        """Take the wrapper out of all sharing, and drop the function that refers back to this object."""
        self._sharing.close()
        self._reducer.averages.left_to_others = frozenset
