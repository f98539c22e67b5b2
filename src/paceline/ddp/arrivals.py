"""Determines which gradients have arrived in the current backward pass, with as few Python hooks as possible.

A post-accumulate-grad hook costs microseconds. So once the order of arrival is known, only the parameter whose gradient
arrives last in a bucket keeps a hook; ``p.grad is not None`` shows the other arrivals. If gradients existed before
backward began (accumulation), or the order is not known yet, every parameter has a hook.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from operator import attrgetter
from typing import Any

from torch import Tensor, nn

from paceline.core.torch_internals.autograd import comes_last
from paceline.core.torch_internals.tensors import content_of
from paceline.ddp.reducer.gradients import gradient_of, is_none

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
        wanted = self._everything if self.counts_each or hook_all else self._triggers
        # Fewer handles than wanted: some parameters were frozen, and may have been unfrozen since.
        is_missing = len(self._handles) != len(wanted)
        if wanted is not self._wanted or is_missing or not all(map(_requires_grad, self._hooked)):
            self._set_hooks(wanted)

    def hook_all(self) -> None:
        """Hook every parameter until a backward pass begins, because double backward may bypass the triggers."""
        self._set_hooks(self._everything)

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
        self._had_absent = bool(absent)
        missed = [0] * len(self._parameters)
        for index in absent:
            missed[index] = min(PATIENCE, self._absences[index] + 1)
        changed = [(new < PATIENCE) != (old < PATIENCE) for new, old in zip(missed, self._absences, strict=True)]
        self._absences = missed
        if any(changed):
            self._plan_hooks()

    def close(self) -> None:
        """Remove all hooks from the parameters, and drop the reference to the function they called."""
        self._set_hooks(frozenset())
        self._hook = _nothing  # it references the reducer

    def _plan_hooks(self) -> None:
        """Decide which parameters each bucket waits for, and whose hook reports it."""
        expected = [[index for index in indices if self._absences[index] < PATIENCE] for indices in self._layout]
        self._triggers = frozenset(max(indices, key=self._place.__getitem__) for indices in expected if indices)
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


def _nothing(_index: int, _parameter: Tensor) -> None:
    """A no-op that replaces the hook after :meth:`Arrivals.close`."""
