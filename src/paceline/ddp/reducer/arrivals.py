"""Finds out which gradients have arrived in the running backward, with as few Python hooks as possible.

A hook costs microseconds, so once the order of arrival is known only the parameter that arrives last in a bucket keeps
one, and ``p.grad is not None`` tells of the others. Where that cannot tell, because gradients were there before
backward began (accumulation) or the order is not known yet, every parameter has a hook.
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
"""Backwards in a row without a gradient after which a parameter is no longer waited for on this rank."""
_trains = attrgetter("requires_grad")


class Arrivals:
    """The arrival of gradients on this rank, bucket by bucket.

    Args:
        parameters: those that are averaged.
        hook: called as ``hook(index, parameter)`` when a gradient was accumulated into a parameter.
    """

    observed: list[int]
    """Parameters in the order in which their gradients arrived, in a backward with a hook for every parameter."""
    order_known: bool
    """Whether buckets are in the order of arrival, so that few hooks do."""
    counts: bool
    """Whether :meth:`arrived` has to be told of each gradient in this backward."""

    def __init__(self, parameters: Sequence[nn.Parameter], hook: Callable[[int, Tensor], None]) -> None:
        self.observed = []
        self._parameters, self._hook = parameters, hook
        self._handles: dict[int, Any] = {}  # by parameter
        self._wanted: frozenset[int] | None = None  # the parameters to be hooked, frozen ones included
        self._hooked: list[nn.Parameter] = []  # the same as they were when hooks were put on them
        self._content = content_of(parameters)
        self._missed = [0] * len(parameters)  # backwards in a row without its gradient
        self._misses = False  # whether a gradient has not come in the latest backward
        # Place of each parameter in this rank's order of arrival; the reverse order is the usual one.
        self._place = [-index for index in range(len(parameters))]

    def use_layout(self, layout: list[list[int]], *, order_known: bool) -> None:
        """Follow other buckets; with `order_known`, hooks are left to the last parameter of each."""
        self._layout, self.order_known = layout, order_known
        self._everything = frozenset(index for indices in layout for index in indices)
        self._bucket_of = {index: at for at, indices in enumerate(layout) for index in indices}
        if order_known and not self.observed:
            self.observed = [index for indices in layout for index in indices]
        for place, index in enumerate(self.observed):
            self._place[index] = place
        self._expect()

    def refresh(self) -> None:
        """Look at the parameters anew, some of which have been replaced in their list."""
        self._wanted = None
        self._expect()

    def begin(self, *, cleared: bool, hook_all: bool = False) -> None:
        """A backward begins; `cleared` if no parameter has a gradient yet, `hook_all` as in :meth:`hook_all`."""
        self.counts = not (cleared and self.order_known)
        if self.counts:
            self.observed = []
            self._seen = bytearray(len(self._parameters))
            self._pending = [len(awaited) for awaited in self._awaited]
        if content_of(self._parameters) != self._content:  # torch.utils.swap_tensors has taken the hooks along
            self._keep_hooks(frozenset())
            self._content = content_of(self._parameters)
        wanted = self._everything if self.counts or hook_all else self._triggers
        if wanted is not self._wanted or len(self._handles) != len(wanted) or not all(map(_trains, self._hooked)):
            self._keep_hooks(wanted)

    def hook_all(self) -> None:
        """Hear of every gradient until a backward begins, as this one need not reach the parameters with a hook."""
        self._keep_hooks(self._everything)

    def arrived(self, index: int) -> None:
        """A gradient was accumulated into parameter `index`; called while :attr:`counts`."""
        self.observed.append(index)
        if not self._seen[index]:
            self._seen[index] = True
            if self._missed[index] < PATIENCE:
                self._pending[self._bucket_of[index]] -= 1

    def complete(self, number: int, latest: int) -> list[Tensor | None] | None:
        """Return the gradients of bucket `number` if all expected ones are there; None if not.

        Nor are they returned while other hooks of the `latest` parameter have not run. Users may register hooks at any
        time, which are to find the gradient and may change it. In the first backward with such a hook the bucket is
        launched when the next gradient arrives, or at the end; from then on our hook is the last one.
        """
        owned, awaited = self._owned[number], self._awaited[number]
        # Most buckets are asked for before anything of them has come.
        if self._pending[number] if self.counts else awaited and awaited[-1].grad is None:
            return None
        # A gradient that Python has not seen before costs as much as its copy, so all are read once.
        gradients = list(map(gradient_of, owned))
        if not self.counts and any(map(is_none, gradients if awaited is owned else map(gradient_of, awaited))):
            return None
        handle = self._handles.get(latest)
        return gradients if handle is not None and comes_last(handle, ArrivalHook) else None

    def end(self, absent: Sequence[int]) -> None:
        """A backward has ended, without gradients for the `absent` parameters on this rank."""
        if not (absent or self._misses):  # as in most backwards
            return
        self._misses = bool(absent)
        missed = [0] * len(self._parameters)
        for index in absent:
            missed[index] = min(PATIENCE, self._missed[index] + 1)
        changed = [(a < PATIENCE) != (b < PATIENCE) for a, b in zip(missed, self._missed, strict=True)]
        self._missed = missed
        if any(changed):
            self._expect()

    def close(self) -> None:
        """Remove all hooks from the parameters, and forget the function that they called."""
        self._keep_hooks(frozenset())
        self._hook = _nothing

    def _expect(self) -> None:
        """Decide which parameters each bucket waits for, and whose hook reports it."""
        expected = [[index for index in indices if self._missed[index] < PATIENCE] for indices in self._layout]
        self._triggers = frozenset(max(indices, key=self._place.__getitem__) for indices in expected if indices)
        self._owned = [[self._parameters[index] for index in indices] for indices in self._layout]
        self._awaited = [
            owned if len(indices) == len(owned) else [self._parameters[index] for index in indices]
            for owned, indices in zip(self._owned, expected, strict=True)
        ]

    def _keep_hooks(self, wanted: frozenset[int]) -> None:
        self._wanted, self._hooked = wanted, [self._parameters[index] for index in wanted]
        # A parameter frozen since takes no hook; it gets one in the first backward after it is thawed.
        wanted = frozenset(index for index in wanted if self._parameters[index].requires_grad)
        for index in self._handles.keys() - wanted:
            self._handles.pop(index).remove()
        for index in wanted - self._handles.keys():
            arrives = ArrivalHook(self._hook, index)
            self._handles[index] = self._parameters[index].register_post_accumulate_grad_hook(arrives)


class ArrivalHook(partial[None]):
    """A hook of ours, by which it is told from users'."""


def _nothing(_index: int, _parameter: Tensor) -> None:
    """The hook of one that is closed."""
