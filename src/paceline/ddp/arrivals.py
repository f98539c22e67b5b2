"""Determines which gradients have arrived in the current backward pass, and copies them into buckets.

A post-accumulate-grad hook costs microseconds. So once the order of arrival is known, only the parameter whose gradient
arrives last in a bucket keeps a hook; ``p.grad is not None`` shows the other arrivals. If gradients existed before
backward began (accumulation), or the order is not known yet, every parameter has a hook. Many gradients are checked and
copied at once, without Python code for each if possible.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from operator import attrgetter, is_
from typing import Any

import torch
from torch import Tensor, nn

from paceline.core.digests import quick_digest
from paceline.core.missing_ranks import named_ranks
from paceline.core.torch_internals import LARGE, comes_last, content_of, copy_each, copy_scaled
from paceline.ddp.backward import Backward
from paceline.ddp.buckets import Bucket
from paceline.ddp.channel import Channel
from paceline.ddp.module_changes import Trained
from paceline.errors import UsageError

gradient_of: Callable[[Tensor], Any] = attrgetter("grad")
is_none: Callable[[object], bool] = partial(is_, None)
"""Compares by identity, because ``==`` of a tensor compares elements."""


def present(parameters: Sequence[Tensor]) -> dict[int, Tensor]:
    """Return the gradients that are not None, keyed by parameter index."""
    # The usual case at the end of a backward pass, detected without per-parameter Python code.
    if grads_are_none(parameters):
        return {}
    return {place: gradient for place, gradient in enumerate(map(gradient_of, parameters)) if gradient is not None}


def grads_are_none(parameters: Iterable[Tensor]) -> bool:
    return all(map(is_none, map(gradient_of, parameters)))


def copy_into(bucket: Bucket, gradients: list[Any], parameters: Sequence[nn.Parameter]) -> bool:
    """Copy the `gradients` of `parameters` (tensors or None) into `bucket`, and set each ``p.grad`` to None.

    Returns False, with ``p.grad`` unchanged, if one of them is missing or not dense.
    """
    try:  # cheaper than checking first whether all are present and dense
        if bucket.prescale == 1.0:
            copy_each(bucket.views, gradients)
        else:
            copy_scaled_into(bucket, gradients)
    except (AttributeError, RuntimeError, TypeError):  # the caller then copies one by one and handles each case
        return False
    # Freed here rather than at the end of backward, so that only one bucket's gradients exist twice at a time.
    for parameter in parameters:
        parameter.grad = None
    return True


def copy_scaled_into(bucket: Bucket, gradients: list[Any]) -> None:
    """Copy the `gradients`, times the bucket's factor, into `bucket`; raise an error if one is missing or not dense."""
    copy_times(bucket.views, gradients, bucket.prescale, bucket.flat if bucket.largest < LARGE else None)


def copy_times(targets: list[Tensor], sources: list[Any], factor: float, flat: Tensor | None = None) -> None:
    """Copy `sources`, times `factor`, into `targets`; `flat`, if given, is their joint memory, scaled in one call."""
    if flat is None:
        copy_scaled(targets, sources, factor)
    else:
        copy_each(targets, sources)
        flat.mul_(factor)


def copy_one_by_one(backward: Backward, bucket: Bucket, trained: Trained, rank: int) -> None:
    """Copy gradients, some of which may be absent, sparse, older or another wrapper's; record these in `backward`."""
    sources, targets, absent, sparse = [], [], [], []
    saved_gradients = dict(backward.saved_gradients)
    for index, view in zip(bucket.indices, bucket.views, strict=True):
        parameter = trained.parameters[index]
        gradient = None if index in backward.averaged_elsewhere else parameter.grad
        if gradient is None or gradient.is_sparse:
            view.zero_()  # the bucket holds the averages of the last step
            if gradient is not None:
                sparse.append(index)  # stays in p.grad for the second pass
            elif index not in backward.averaged_elsewhere:
                absent.append(index)
            continue
        if gradient is not view:
            if gradient.layout is not torch.strided:
                raise UsageError(
                    f"rank {rank}: parameter {trained.names[index]!r} has a {gradient.layout} gradient, which buckets "
                    "cannot hold; use a layer with dense gradients"
                )
            if not backward.grads_were_none:
                saved_gradients[index] = gradient
        # After zero_grad(set_to_none=False) the gradient was accumulated into the bucket view itself.
        if gradient is not view or bucket.prescale != 1.0:
            sources.append(gradient)
            targets.append(view)
        parameter.grad = None
    if sources:
        copy_times(targets, sources, bucket.prescale)
    backward.saved_gradients = saved_gradients
    backward.absent = [*backward.absent, *absent]
    backward.sparse_in_buckets = [*backward.sparse_in_buckets, *sparse]


def find_out_of_bucket(backward: Backward, trained: Trained, unbucketed: Iterable[int]) -> None:
    """At the end of backward, find this rank's gradients outside the buckets, and the parameters without a gradient.

    Called after every bucket has been filled, which sets the copied gradients to None.
    """
    elsewhere = backward.averaged_elsewhere
    gradients = {index: gradient for index, gradient in present(trained.parameters).items() if index not in elsewhere}
    # A sparse gradient that arrives after a dense one was launched is a late delta like any other.
    alone = {*backward.absent, *backward.sparse_in_buckets, *unbucketed}
    backward.sparse = sparse = [index for index, gradient in gradients.items() if gradient.is_sparse and index in alone]
    backward.late = [index for index in gradients if index not in sparse] if len(sparse) < len(gradients) else []
    # A parameter with a late gradient is not absent: its gradient must not become None.
    outside = [index for index in unbucketed if index not in elsewhere]
    backward.absent = [index for index in (*backward.absent, *outside) if index not in gradients]
    backward.out_of_bucket = gradients


_ABSENT = 0x6E6F6E65
"""The number used as the digest of a gradient that is None."""


def check_equal_gradients(names: Sequence[str], parameters: Sequence[nn.Parameter], channel: Channel) -> None:
    """Compare 64-bit digests of the gradients between the ranks of `channel`, in one small collective."""
    digests = torch.tensor([digest_of(parameter.grad) for parameter in parameters], dtype=torch.int64, device="cpu")
    table = channel.gathered_rows(digests, "comparison of gradients")
    if (difference := unequal(names, table.tolist())) is not None:
        raise UsageError(
            f"model.gradients_are_averaged() found gradients that differ between ranks: {difference}; average them "
            "over the ranks first, or call model.sync_gradients() instead, which does so"
        )


def unequal(names: Sequence[str], rows: Sequence[Sequence[int]]) -> str | None:
    """Describe the first gradient that differs between ranks, given every rank's digests; None if all are equal."""
    differing = [place for place in range(len(names)) if len({row[place] for row in rows}) > 1]
    if not differing:
        return None
    place = differing[0]
    odd = [rank for rank, row in enumerate(rows) if row[place] != rows[0][place]]
    others = f" (and of {len(differing) - 1} more parameters)" if len(differing) > 1 else ""
    return f"that of {names[place]!r}{others} is not the same on {named_ranks(odd)} as on rank 0"


def digest_of(gradient: Tensor | None) -> int:
    if gradient is None:
        return _ABSENT
    if gradient.is_sparse:
        coalesced = gradient.detach().coalesce()
        return int(quick_digest(coalesced.indices()) ^ quick_digest(coalesced.values()))
    return int(quick_digest(gradient))


PATIENCE = 3
"""Number of consecutive backward passes without a parameter's gradient after which this rank stops waiting for it.
Otherwise, a bucket with an unused parameter would always be launched at the end."""
_requires_grad = attrgetter("requires_grad")


class Arrivals:
    """Tracks the arrival of gradients on this rank, bucket by bucket.

    Args:
        parameters: the averaged parameters.
        hook: called as ``hook(index, parameter)`` when a gradient has been accumulated into a parameter.
    """

    observed: list[int]
    """Parameters in the order their gradients arrived, from a backward pass with every parameter hooked."""
    order_known: bool
    """Whether buckets follow the arrival order, so that a few hooks are enough."""
    counts_each: bool
    """Whether :meth:`arrived` must be called for each gradient in this backward pass."""
    is_lean = False
    """Whether only :attr:`triggers` have hooks, and every gradient arrived in the latest backward pass."""
    triggers: frozenset[int]
    """The parameters whose hooks report that a bucket is full. Replaced as a whole if they change."""

    def __init__(self, parameters: Sequence[nn.Parameter], hook: Callable[[int, Tensor], None]) -> None:
        self.observed = []
        self._parameters, self._hook = parameters, hook
        self._handles: dict[int, Any] = {}  # by parameter
        self._wanted: frozenset[int] | None = None  # the parameters to be hooked, frozen ones included
        self._hooked: list[nn.Parameter] = []  # the parameter objects of `_wanted`
        self._content = content_of(parameters)
        self._absences = [0] * len(parameters)  # per parameter: consecutive passes without a gradient
        self._had_absent = False  # whether a gradient was absent in the latest backward pass
        # Position of each parameter in this rank's order of arrival. Initially in reverse, which is the usual order.
        self._place = [-index for index in range(len(parameters))]

    def use_layout(self, layout: list[list[int]], *, order_known: bool) -> None:
        """Use the buckets of `layout`; with `order_known`, only the last parameter of each keeps a hook."""
        self._layout, self.order_known = layout, order_known
        self._everything = frozenset(index for indices in layout for index in indices)
        self._bucket_of = {index: at for at, indices in enumerate(layout) for index in indices}
        if order_known and not self.observed:
            self.observed = [index for indices in layout for index in indices]
        for place, index in enumerate(self.observed):
            self._place[index] = place
        self._plan_hooks()

    def begin(self, *, grads_were_none: bool, hook_all: bool = False) -> None:
        """Prepare the hooks for a backward pass.

        Args:
            grads_were_none: whether no parameter has a gradient yet, so that any gradient seen later has arrived.
            hook_all: whether to hook every parameter, as :meth:`hook_all` does.
        """
        self.counts_each = not (grads_were_none and self.order_known)
        if self.counts_each:
            self.observed = []
            self._seen = bytearray(len(self._parameters))
            self._pending = [len(awaited) for awaited in self._awaited]
        if content_of(self._parameters) != self._content:  # torch.utils.swap_tensors has moved the hooks
            self._set_hooks(frozenset())
            self._content = content_of(self._parameters)
        wanted = self._everything if self.counts_each or hook_all else self.triggers
        # Fewer handles than wanted: some parameters were frozen, and may have been unfrozen since.
        is_missing = len(self._handles) != len(wanted)
        if wanted is not self._wanted or is_missing or not all(map(_requires_grad, self._hooked)):
            self._set_hooks(wanted)
        self.is_lean = wanted is self.triggers and not self._had_absent and len(self._handles) == len(wanted)

    def hook_all(self) -> None:
        """Hook every parameter until a backward pass begins, because double backward may bypass the triggers."""
        self._set_hooks(self._everything)
        self.is_lean = False

    def arrived(self, index: int) -> None:
        """Count a gradient accumulated into parameter `index`; called only while :attr:`counts_each` is set."""
        self.observed.append(index)
        # Reentrant checkpointing accumulates into a parameter more than once.
        if not self._seen[index]:
            self._seen[index] = True
            if self._absences[index] < PATIENCE:
                self._pending[self._bucket_of[index]] -= 1

    def gradients_if_complete(self, number: int, latest: int) -> list[Tensor | None] | None:
        """Return the gradients of bucket `number` if all expected ones have arrived, else None.

        Also returns None while other hooks of the `latest` parameter have yet to run. Users may register hooks at any
        time. Their hooks must see the gradient and may change it. In the first backward pass with such a hook, the
        bucket is launched when the next gradient arrives, or at the end. From then on, our hook runs last.
        """
        owned, awaited = self._owned[number], self._awaited[number]
        # The cheap check first: usually the bucket is not complete yet.
        if self._pending[number] if self.counts_each else awaited and awaited[-1].grad is None:
            return None
        # Read gradients only once, because torch creates a Python object for each read, which takes as long as a copy.
        gradients = list(map(gradient_of, owned))
        if not self.counts_each and any(map(is_none, gradients if awaited is owned else map(gradient_of, awaited))):
            return None
        handle = self._handles.get(latest)
        return gradients if handle is not None and comes_last(handle, ArrivalHook) else None

    def end(self, absent: Sequence[int]) -> None:
        """Record that a backward pass ended without gradients for the `absent` parameters on this rank."""
        if not (absent or self._had_absent):  # true for most backward passes
            return
        self._had_absent, self.is_lean = bool(absent), False
        missed = [0] * len(self._parameters)
        for index in absent:
            missed[index] = min(PATIENCE, self._absences[index] + 1)
        changed = [(new < PATIENCE) != (old < PATIENCE) for new, old in zip(missed, self._absences, strict=True)]
        self._absences = missed
        if any(changed):
            self._plan_hooks()

    def trigger(self, number: int) -> tuple[int, dict[int, Any]]:
        """Return the parameter whose hook reports that bucket `number` is full, and the dict of all its hooks."""
        (index,) = self.triggers.intersection(self._layout[number])
        hooks = self._handles[index].hooks_dict_ref()
        return index, hooks

    def replace_triggers(self, functions: Sequence[Callable[[Tensor], None]]) -> None:
        """Call the function of each bucket instead of the general hook when it is full."""
        for number, function in enumerate(functions):
            index, hooks = self.trigger(number)
            hooks[self._handles[index].id] = ArrivalHook(function)

    def restore_triggers(self) -> None:
        """Undo :meth:`replace_triggers`."""
        for index, handle in self._handles.items():
            hooks = handle.hooks_dict_ref()
            if hooks is not None and handle.id in hooks:
                hooks[handle.id] = ArrivalHook(self._hook, index)

    def close(self) -> None:
        """Remove all hooks from the parameters, and drop the reference to the function they called."""
        self._set_hooks(frozenset())
        self._hook = lambda _index, _parameter: None  # it references the reducer

    def _plan_hooks(self) -> None:
        """Decide which parameters each bucket waits for, and whose hook reports it."""
        expected = [[index for index in indices if self._absences[index] < PATIENCE] for indices in self._layout]
        self.triggers = frozenset(max(indices, key=self._place.__getitem__) for indices in expected if indices)
        self._owned = [[self._parameters[index] for index in indices] for indices in self._layout]
        # If all are awaited, this is the same list object, so that gradients_if_complete() reads gradients only once.
        self._awaited = [
            owned if len(indices) == len(owned) else [self._parameters[index] for index in indices]
            for owned, indices in zip(self._owned, expected, strict=True)
        ]

    def _set_hooks(self, wanted: frozenset[int]) -> None:
        self._wanted, self._hooked = wanted, [self._parameters[index] for index in wanted]
        # torch rejects a hook on a frozen parameter; it gets one in the first backward pass after unfreezing.
        wanted = frozenset(index for index in wanted if self._parameters[index].requires_grad)
        for index in self._handles.keys() - wanted:
            self._handles.pop(index).remove()
        for index in wanted - self._handles.keys():
            arrives = ArrivalHook(self._hook, index)
            self._handles[index] = self._parameters[index].register_post_accumulate_grad_hook(arrives)


class ArrivalHook(partial[None]):
    """One of our post-accumulate-grad hooks; its class distinguishes it from users' hooks."""
