"""Parameters that several live wrappers have in common, such as the shared body of an actor and a critic.

A wrapper takes part in a backward pass only if it goes through one of the wrapper's forward passes, and averages what
is then in ``p.grad``. That may include an average of another wrapper, which is equal on every rank, so averaging it
again does not change it: ``p.grad`` ends up as the sum of all wrappers' averages.

One backward pass through two wrappers with common parameters is refused. Autograd sums such a parameter's gradient over
both wrappers before it arrives, so both would average it.

Decision 0020 says why.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from weakref import WeakKeyDictionary, WeakSet

from paceline.core.torch_internals.autograd import current_task
from paceline.ddp.agreement.ledger import Ledger
from paceline.ddp.consistency.module_changes import Trained
from paceline.ddp.reducer.backward import Backward
from paceline.ddp.reducer.extension import Extension
from paceline.ddp.reducer.reducer import Reducer
from paceline.errors import UsageError


def _nothing() -> None:
    """Ignore the call."""


class Sharing:
    """Tracks which parameters of one wrapper are also trained by other live wrappers.

    Args:
        trained: the wrapper's parameters.
        ledger: the wrapper's ledger.
        ranks: the global ranks that the wrapper averages over.
        is_under_way: returns whether the wrapper is in a synchronized backward pass.
        changed: called when the set of wrappers that share parameters with this wrapper has changed.
    """

    left_to_others: frozenset[int]
    """Parameters that another wrapper averaged last; the step guard of that wrapper is responsible for them."""

    def __init__(
        self,
        trained: Trained,
        ledger: Ledger,
        ranks: Sequence[int],
        is_under_way: Callable[[], bool | None],
        changed: Callable[[], None] = _nothing,
    ) -> None:
        self.left_to_others = frozenset()
        self._names, self._parameters, self._ledger = trained.names, trained.parameters, ledger
        self._ranks, self._is_under_way, self._changed = [*ranks], is_under_way, changed
        self._index_of = {id(parameter): index for index, parameter in enumerate(trained.originals)}
        # For each wrapper with common parameters, the indices of these in this wrapper. An entry disappears with its
        # wrapper.
        self._partners: WeakKeyDictionary[Sharing, frozenset[int]] = WeakKeyDictionary()
        for other in list(_sharings):
            if common := self._index_of.keys() & other._index_of.keys():
                self._partners[other] = frozenset(self._index_of[key] for key in common)
                other._partners[self] = frozenset(other._index_of[key] for key in common)
                other._changed()
        _sharings.add(self)

    def __bool__(self) -> bool:
        return bool(self._partners)

    @property
    def common(self) -> frozenset[int]:
        """Indices of the parameters that another live wrapper also has."""
        return frozenset().union(*self._partners.values())

    @property
    def is_partner_in_backward(self) -> bool:
        """Whether the running backward pass goes through another wrapper with common parameters."""
        # A list, because garbage collection may remove a partner during iteration.
        return any(partner._is_in_backward() for partner in list(self._partners))

    def _is_in_backward(self) -> bool:
        # A pass under no_sync() is known by its graph task; reentrant checkpoints run tasks inside another one.
        return bool(self._is_under_way()) or self._ledger.task == current_task() != -1

    def begin(self) -> None:
        """Begin to average, after :meth:`check`."""
        self.check()
        self.left_to_others = frozenset()
        for partner in list(self._partners):
            partner.left_to_others |= partner._partners.get(self, frozenset())

    def check(self) -> None:
        """Refuse a backward pass that would mix gradients of this wrapper and of another one."""
        for partner, common in list(self._partners.items()):
            shared = f"DistributedDataParallel wrappers that share {self._names[min(common)]!r}"
            if partner._is_in_backward():
                raise UsageError(
                    f"one backward pass runs through two {shared}; wrap one module that contains both, or run a "
                    "separate backward pass for each"
                )
            present = {index for index in common if self._parameters[index].grad is not None}
            if partner._ranks != self._ranks and present & self.left_to_others:
                raise UsageError(
                    f"p.grad holds an average over ranks {partner._ranks}, and a backward pass would average it over "
                    f"ranks {self._ranks}, in two {shared}; wrap both with the same process group, or set gradients to "
                    "None first"
                )
            theirs = partner._ledger
            theirs.forget_dropped(partner._parameters, in_backward=False)
            has_weights = self._ledger.is_weight_pending or theirs.is_weight_pending
            if present and theirs.local_backwards and has_weights:
                raise UsageError(
                    f"gradients of two {shared} are accumulated under no_sync() with model.weight(), so they cannot be "
                    "divided by the weights of each; synchronize one wrapper's gradients before the other's backward "
                    "pass"
                )

    def close(self) -> None:
        """Remove this wrapper, which is no longer used, from the partners of the other wrappers."""
        _sharings.discard(self)
        for partner in list(self._partners):
            partner._partners.pop(self, None)
            partner._changed()
        self._partners.clear()
        self._changed = _nothing


_sharings: WeakSet[Sharing] = WeakSet()
"""The sharings of all living wrappers of this process."""


class SharedParameters(Extension):
    """Keeps a reducer out of other wrappers' backward passes, and refuses passes through several wrappers."""

    def __init__(self, reducer: Reducer) -> None:
        self._reducer = reducer
        self._make_sharing()

    def _make_sharing(self) -> None:
        reducer = self._reducer
        self._sharing = Sharing(
            reducer.trained, reducer.ledger, reducer.channel.members, lambda: reducer.is_under_way, self._note_partners
        )
        reducer.averages.left_to_others = lambda: self._sharing.left_to_others
        self._note_partners()

    def _note_partners(self) -> None:
        self._reducer.common = self._sharing.common
        self.mark_stale()

    def is_active(self) -> bool:
        """Return whether another live wrapper shares parameters with this one."""
        return bool(self._sharing)

    def other_wrapper_in_backward(self) -> bool:
        """Return whether the running backward pass goes through another wrapper with common parameters."""
        return self._sharing.is_partner_in_backward

    def begin_local(self) -> None:
        self._sharing.check()

    def begin(self, backward: Backward) -> None:
        """Refuse a backward pass that would mix gradients of two wrappers."""
        self._sharing.begin()

    def parameters_changed(self) -> None:
        """Determine which of the new parameters other wrappers also have."""
        self._sharing.close()
        self._make_sharing()

    def close(self) -> None:
        """Stop sharing parameters, and drop the function that refers back to this object."""
        self._sharing.close()
        self._reducer.averages.left_to_others = frozenset
