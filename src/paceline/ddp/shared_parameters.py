"""Parameters that several live wrappers have in common, such as the shared body of an actor and a critic.

A wrapper takes part in a backward pass only if it goes through one of the wrapper's forward passes. Two rules make
common parameters exact:

* If one backward pass goes through several wrappers, autograd sums a common parameter's gradient over all of them
  before it arrives. The wrapper that began first averages it; the others contribute zeros for it.
* An average that a wrapper has left in ``p.grad`` is set aside when a backward pass begins, and added back at its end.

So each contribution is averaged by one wrapper, and ``p.grad`` ends up as the sum of all wrappers' averages.

Decision 0020 says why.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary, WeakSet

from torch import Tensor

from paceline.core.torch_internals import current_task
from paceline.ddp.backward import Backward
from paceline.ddp.extension_points import Extension
from paceline.ddp.ledger import Ledger
from paceline.ddp.module_changes import Trained
from paceline.ddp.weights import WEIGHTED, Seen
from paceline.errors import UsageError


@dataclass(frozen=True)
class Share:
    """One wrapper's common parameters in one backward pass, by index."""

    averaged_elsewhere: Mapping[int, Sharing] = field(default_factory=dict)
    """For each parameter that another wrapper averages in this backward pass, the :class:`Sharing` of that wrapper."""
    set_aside: Mapping[int, Tensor] = field(default_factory=dict)
    """Averages of any wrapper that were in ``p.grad`` before this backward pass."""


NOTHING_SHARED = Share()
"""The share of a wrapper without common parameters."""


class Sharing:
    """Tracks which parameters of one wrapper are also trained by other live wrappers.

    Args:
        trained: the wrapper's parameters.
        ledger: the wrapper's ledger.
        ranks: the global ranks that the wrapper averages over.
        changed: called when the set of wrappers that share parameters with this wrapper has changed.
    """

    is_active: bool
    """Whether the wrapper is in a synchronized backward pass."""
    left_to_others: frozenset[int]
    """Parameters that another wrapper averaged last; the step guard of that wrapper is responsible for them."""

    def __init__(
        self, trained: Trained, ledger: Ledger, ranks: Sequence[int], changed: Callable[[], None] = lambda: None
    ) -> None:
        self.is_active, self._changed = False, changed
        self.left_to_others = frozenset()
        self._names, self._parameters, self._ledger, self._ranks = trained.names, trained.parameters, ledger, [*ranks]
        self._keys = [id(parameter) for parameter in trained.originals]
        self._index_of = {key: index for index, key in enumerate(self._keys)}
        # For each wrapper with common parameters, the indices of these in this wrapper. An entry disappears with its
        # wrapper.
        self._partners: WeakKeyDictionary[Sharing, frozenset[int]] = WeakKeyDictionary()
        # For each common parameter, by id: the average last written to p.grad.
        self._shown: dict[int, Seen] = {}
        # By parameter id: averages that the running backward pass has set aside and not added back yet.
        self._to_add: dict[int, Tensor] = {}
        # Ids of common parameters that have no gradient on this rank in the running backward pass.
        self._absent: frozenset[int] = frozenset()
        for other in list(_sharings):
            common = self._index_of.keys() & other._index_of.keys()
            if common:
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
    def is_partner_active(self) -> bool:
        """Whether another wrapper with common parameters is in a backward pass."""
        # A list, because garbage collection may remove a partner during iteration.
        return any(partner.is_active for partner in list(self._partners))

    # -- a synchronized backward ----------------------------------------------------------------------------------

    def begin(self) -> Share:
        """Begin a synchronized backward pass: decide who averages each parameter, and set aside others' averages."""
        share = NOTHING_SHARED
        self._forget_dropped()
        if self._partners:
            elsewhere: dict[int, Sharing] = {}
            for partner, common in list(self._partners.items()):
                if partner.is_active:  # the partner began first in this backward pass
                    elsewhere |= {index: partner for index in common if index not in elsewhere}
            for partner in set(elsewhere.values()):
                self._check_same_mean(partner, elsewhere)
            set_aside = {}
            # Every decision here must be the same on all ranks, although the order of backward passes through common
            # parameters may differ. So an average is not set aside if it may contain local gradients on some ranks.
            sharings = [self, *self._partners]
            is_accumulated = any(sharing._ledger.local_tasks for sharing in sharings)
            for index in () if is_accumulated else self.common - elsewhere.keys():
                gradient = self._parameters[index].grad
                if gradient is not None and self._was_shown(index, gradient, sharings):
                    # A copy, because the gradient may be part of the partner's bucket, which the next backward pass
                    # overwrites.
                    set_aside[index] = gradient.detach().clone()
                    self._parameters[index].grad = None
            share = Share(elsewhere, set_aside)
        self._to_add = {self._keys[index]: gradient for index, gradient in share.set_aside.items()}
        self.is_active = True
        return share

    def note_absent(self, absent: Sequence[int]) -> None:
        """Remember the parameters whose gradient is `absent` on this rank; called after all buckets are launched."""
        if self._partners:
            self._absent = frozenset(self._keys[index] for index in absent)

    def lacks(self, index: int, share: Share) -> bool:
        """Return whether the wrapper that averages parameter `index` has no gradient for it on this rank."""
        return self._keys[index] in share.averaged_elsewhere[index]._absent

    def show(self, averages: Mapping[int, Tensor | None], share: Share) -> None:
        """Add this wrapper's averages of common parameters to averages that were set aside or are in ``p.grad``.

        Averages that were set aside are added first, no matter which wrapper set them aside, because the order
        determines the bits of the sum.
        """
        for index, average in averages.items():
            parameter = self._parameters[index]
            set_aside = share.averaged_elsewhere.get(index, self)._to_add.pop(self._keys[index], None)
            parameter.grad = _sum(average, _sum(parameter.grad, set_aside))

    def end(self) -> None:
        """End the backward pass, and remember which gradients are this wrapper's averages."""
        self.is_active = False
        if not self._partners:
            return
        self._shown = {}
        for index in self.common:
            gradient = self._parameters[index].grad
            if gradient is not None:
                self._shown[self._keys[index]] = Seen.of(gradient)
        self.left_to_others = frozenset()
        for partner in list(self._partners):
            partner.left_to_others |= partner._partners.get(self, frozenset())

    def abort(self, share: Share) -> None:
        """Restore the averages that were set aside; called after an exception interrupts the backward pass."""
        self.is_active = False
        self._to_add = {}
        for index, gradient in share.set_aside.items():
            self._parameters[index].grad = gradient

    def close(self) -> None:
        """Remove this wrapper, which is no longer used, from the partners of the other wrappers."""
        self.is_active = False
        _sharings.discard(self)
        for partner in list(self._partners):
            partner._partners.pop(self, None)
            partner._changed()
        self._partners.clear()
        self._changed = lambda: None

    def _forget_dropped(self) -> None:
        """Forget other wrappers' backward passes under ``no_sync`` whose gradients were dropped."""
        for partner in list(self._partners):
            if partner._ledger.task != current_task():  # otherwise the running backward pass goes through it
                partner._ledger.forget_dropped(partner._parameters, in_backward=False)

    # -- refusals ---------------------------------------------------------------------------------------------------

    def begin_local(self) -> None:
        """Refuse a weighted backward pass under ``no_sync`` if ``p.grad`` holds another wrapper's average.

        Dividing by the weights would scale that average again.
        """
        self._forget_dropped()
        if not self._partners or not self._ledger.is_weight_pending:
            return
        for index in self.common:
            gradient = self._parameters[index].grad
            if gradient is not None and self._was_shown(index, gradient, list(self._partners)):
                raise UsageError(
                    f"the gradient of {self._names[index]!r} is already an average of another DistributedDataParallel, "
                    "and a backward pass inside model.weight() and no_sync() would add undivided gradients to it; run "
                    "this model's micro-batches first, or set gradients to None before running them"
                )

    def check_not_mixed(self) -> None:
        """Refuse weights if another wrapper still has gradients to average, which this average may include."""
        is_weighted = any(int(weighting) & WEIGHTED for _, weighting in self._ledger.notes)
        for partner, common in list(self._partners.items()):
            has_weights = is_weighted or partner._ledger.is_weight_pending
            if has_weights and partner._ledger.local_tasks and not partner.is_active:
                raise self._mixed(common)

    def _check_same_mean(self, first: Sharing, elsewhere: Mapping[int, Sharing]) -> None:
        """Refuse a backward pass through two wrappers that average a common parameter with different divisors."""
        name = next(self._names[index] for index, partner in elsewhere.items() if partner is first)
        if first._ranks != self._ranks:
            raise UsageError(
                f"one backward pass runs through two DistributedDataParallel wrappers that share {name!r} but average "
                f"over different ranks, {first._ranks} and {self._ranks}; wrap both with the same process "
                "group, or run a separate backward pass for each"
            )
        weight, theirs = self._weight(), first._weight()
        # If this wrapper is inside a wrapped model, the outer wrapper averages all of its parameters with the outer
        # weight.
        is_inside = weight is None and len(elsewhere) == len(self._parameters)
        if weight != theirs and not is_inside:
            shown = [f"model.weight({value:g})" if value is not None else "no weight" for value in (theirs, weight)]
            raise UsageError(
                f"one backward pass runs through two DistributedDataParallel wrappers that share {name!r}, one with "
                f"{shown[0]} and the other with {shown[1]}, so their gradients cannot be separated; give both the same "
                "weight, or run a separate backward pass for each"
            )
        if weight is not None and first._ledger.local_tasks != self._ledger.local_tasks:
            raise self._mixed([index for index, partner in elsewhere.items() if partner is first])

    def _mixed(self, common: Collection[int]) -> UsageError:
        return UsageError(
            "with model.weight(), two DistributedDataParallel wrappers that share "
            f"{self._names[min(common)]!r} have accumulated different backward passes under no_sync(), so their "
            "gradients cannot be separated; end one wrapper's accumulation with a synchronized backward pass and set "
            "gradients to None before the other's begins, or wrap one module that contains both"
        )

    def _weight(self) -> float | None:
        status = self._ledger.status
        self._ledger.add_up()
        return status.weight if status.weighting & WEIGHTED else None

    def _was_shown(self, index: int, gradient: Tensor, by: Sequence[Sharing]) -> bool:
        """Return whether `gradient` is an unchanged average of one of the wrappers in `by`."""
        shown = [wrapper._shown.get(self._keys[index]) for wrapper in by]
        return any(average is not None and average.is_unchanged(gradient) for average in shown)


def _sum(total: Tensor | None, more: Tensor | None) -> Tensor | None:
    """Return `total` + `more`, in place if both are dense; a sparse tensor stays sparse if the other is zero."""
    if total is None or more is None:
        return more if total is None else total
    if not total.is_sparse and not more.is_sparse:
        return total.add_(more)
    if total.is_sparse != more.is_sparse:
        sparse, dense = (total, more) if total.is_sparse else (more, total)
        return sparse if not dense.any() else dense + sparse
    return total + more


_sharings: WeakSet[Sharing] = WeakSet()
"""The sharings of all living wrappers of this process."""


class SharedParameters(Extension):
    """Makes a reducer average common parameters only once, and add its averages to other wrappers' averages.

    Args:
        trained: the wrapper's parameters.
        ledger: the wrapper's ledger.
        ranks: the global ranks that the wrapper averages over.
    """

    def __init__(self, trained: Trained, ledger: Ledger, ranks: Sequence[int]) -> None:
        self._trained, self._ledger, self._ranks = trained, ledger, ranks
        self._share = NOTHING_SHARED
        self._make_sharing()

    def _make_sharing(self) -> None:
        self._sharing = Sharing(self._trained, self._ledger, self._ranks, lambda: self.mark_stale())

    def is_active(self) -> bool:
        """Return whether another live wrapper shares parameters with this one."""
        return bool(self._sharing)

    def common(self) -> Collection[int]:
        """Return the parameters that other live wrappers also have."""
        return self._sharing.common

    def left_to_others(self) -> Collection[int]:
        """Return the parameters that another wrapper averaged last."""
        return self._sharing.left_to_others

    def other_wrapper_in_backward(self) -> bool:
        """Return whether another wrapper with common parameters is in a backward pass."""
        return self._sharing.is_partner_active

    def begin_local(self) -> None:
        """Refuse a weighted backward pass that would add to another wrapper's average."""
        self._sharing.begin_local()

    def begin(self, backward: Backward) -> None:
        """Decide who averages each parameter, and set aside others' averages before gradients are inspected."""
        self._share = NOTHING_SHARED
        self._share = share = self._sharing.begin()
        backward.is_shared, backward.averaged_elsewhere = True, share.averaged_elsewhere.keys()

    def has_report(self, backward: Backward) -> bool:
        """Tell the other wrappers which common parameters lack a gradient here; always requires control blocks."""
        if not self._sharing:  # a garbage-collected wrapper does not report that it is gone
            self.mark_stale()
        for index in self._sharing.common & backward.out_of_bucket.keys():
            # The backward state now holds the gradient. If it stayed in p.grad, another wrapper would treat it as its
            # own.
            self._trained.parameters[index].grad = None
        # Another wrapper averages these but has no gradient either, so p.grad may end up as None.
        lacking = [index for index in self._share.averaged_elsewhere if self._sharing.lacks(index, self._share)]
        backward.absent = [*backward.absent, *lacking]
        self._sharing.note_absent(backward.absent)
        return True

    def show(self, backward: Backward, averages: list[Tensor | None]) -> None:
        """Add the averages of common parameters to other wrappers' averages."""
        parameters = self._trained.parameters
        common = self._sharing.common | self._share.set_aside.keys()  # other wrappers may have been deleted by now
        self._sharing.show({index: averages[index] for index in common}, self._share)
        for index in common:
            averages[index] = parameters[index].grad
        # _end() records the gradients in p.grad, so it must run after buckets may have been reallocated in order of
        # arrival. It is the first deferred function, because one of the others may raise.
        backward.deferred = [self._end, *backward.deferred]
        backward.defer(self._sharing.check_not_mixed)

    def _end(self) -> None:
        self._sharing.end()
        self._share = NOTHING_SHARED

    def abort(self, backward: Backward) -> None:
        """Restore the averages that were set aside."""
        self._sharing.abort(self._share)
        self._share = NOTHING_SHARED

    def parameters_changed(self) -> None:
        """Determine which of the new parameters other wrappers also have."""
        self._sharing.close()
        shown = self._sharing._shown
        self._make_sharing()
        self._sharing._shown = shown

    def close(self) -> None:
        """Stop sharing parameters."""
        self._sharing.close()
