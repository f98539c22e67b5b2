"""Parameters that several live wrappers have in common: an actor's and a critic's body, or a model wrapped again.

:mod:`.sharing` has the rules.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from torch import Tensor

from paceline.ddp.extensions.sharing import NOTHING_SHARED, Sharing
from paceline.ddp.reducer.backward import Backward
from paceline.ddp.reducer.extension import Extension
from paceline.ddp.reducer.reducer import Reducer


class SharedParameters(Extension):
    """Has a reducer average common parameters once, and add up what several wrappers have averaged.

    Args:
        reducer: that of the wrapper.
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
            trained.names, trained.given, trained.parameters, self._reducer.ledger, channel.members, self._note_partners
        )
        self._reducer.averages.left_to_others = self._left_to_others
        self._note_partners()

    def _note_partners(self) -> None:
        self._reducer.common = self._sharing.common
        self.changed()

    def _left_to_others(self) -> Collection[int]:
        return self._sharing.left_to_others

    def is_active(self) -> bool:
        """Whether another live wrapper has parameters of this one."""
        return bool(self._sharing)

    def claims_gradients(self) -> bool:
        """Whether a wrapper with common parameters is in a backward."""
        return self._sharing.is_partner_active

    def stays_local(self) -> None:
        """Refuse a weighted backward that would be added to another wrapper's average."""
        self._sharing.check_no_average()

    def begin(self, backward: Backward) -> None:
        """Decide who averages each parameter, and set aside others' averages, before gradients are looked at."""
        self._share = NOTHING_SHARED
        self._share = share = self._sharing.begin()
        backward.is_shared, backward.elsewhere = True, share.elsewhere.keys()
        if share.elsewhere:
            self._check_shared(self._reducer.trained.names[min(share.elsewhere)])

    def has_report(self, backward: Backward) -> bool:
        """Tell the wrappers that average common parameters, and always all ranks, what this rank has of them."""
        if not self._sharing:  # the others are gone, which tells nobody; what was set aside is still to be shown
            self._note_partners()
        for index in self._sharing.common & backward.apart.keys():
            self._reducer.trained.parameters[index].grad = None  # or another wrapper could take it for its own
        lacking = [index for index in self._share.elsewhere if self._sharing.lacks(index, self._share)]
        backward.absent = [*backward.absent, *lacking]
        self._sharing.launched(backward.absent)
        return True

    def show(self, backward: Backward, averages: list[Tensor | None]) -> None:
        """Add the averages of common parameters to those of other wrappers."""
        parameters = self._reducer.trained.parameters
        common = self._sharing.common | self._share.aside.keys()  # other wrappers may have gone since
        self._sharing.show({index: averages[index] for index in common}, self._share)
        for index in common:
            averages[index] = parameters[index].grad
        # First of all, and only now: with the order of arrival buckets may have got other memory.
        backward.findings = [self._end, *backward.findings]

    def _end(self) -> None:
        self._sharing.end()
        self._share = NOTHING_SHARED

    def abort(self, backward: Backward) -> None:
        """Put back what was set aside."""
        self._sharing.abort(self._share)
        self._share = NOTHING_SHARED

    def renew(self) -> None:
        """Look which of the new parameters other wrappers have; those there now are averages of this wrapper."""
        self._sharing.close()
        self._make_sharing()
        self._sharing.end()

    def close(self) -> None:
        """Nobody has anything in common with the wrapper any more, and nothing here refers back to the reducer."""
        self._sharing.close()
        self._reducer.averages.left_to_others = frozenset
