"""Finds out which gradients have arrived in the running backward, with as few Python hooks as possible.

A hook costs microseconds, so once the order of arrival is known only the parameter that arrives last in a bucket keeps
one, and ``p.grad is not None`` tells of the others. Where that cannot tell, because gradients were there before
backward began (accumulation) or the order is not known yet, every parameter has a hook.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn

from paceline.core.torch_internals.autograd import comes_last
from paceline.core.torch_internals.tensors import content_of
from paceline.ddp.engine.gradients.bulk_checks import any_missing, gradients_of

PATIENCE = 3
"""Backwards in a row without a gradient after which a parameter is no longer waited for on this rank."""


class Arrivals:
    """The arrival of gradients on this rank, bucket by bucket."""

    observed: list[int]
    """Parameters in the order in which their gradients arrived, in a backward with a hook for every parameter."""
    order_known: bool
    """Whether buckets are in the order of arrival, so that few hooks do."""
    expects_all: bool
    """Whether every parameter's gradient has come in the latest backward."""

    def __init__(self, parameters: Sequence[nn.Parameter], hook: Callable[[int, Tensor], None]) -> None:
        self.observed = []
        self._parameters, self._hook = parameters, hook
        self._handles: dict[int, Any] = {}  # by parameter
        self._content = content_of(parameters)
        self._missed = [0] * len(parameters)  # backwards in a row without its gradient
        self.expects_all = True
        # Place of each parameter in this rank's order of arrival; the reverse order is the usual one.
        self._place = [-index for index in range(len(parameters))]

    def use_layout(self, layout: list[list[int]], *, order_known: bool) -> None:
        """Follow other buckets; with `order_known`, hooks are left to the last parameter of each."""
        self._layout, self.order_known = layout, order_known
        self._bucket_of = {index: at for at, indices in enumerate(layout) for index in indices}
        if order_known and not self.observed:
            self.observed = [index for indices in layout for index in indices]
        for place, index in enumerate(self.observed):
            self._place[index] = place
        self._expect()

    def begin(self, *, clear: bool, hook_all: bool = False) -> None:
        """A backward begins; `clear` if no parameter has a gradient yet, `hook_all` as in :meth:`hook_all`."""
        self._every = not (clear and self.order_known)
        if self._every:
            self.observed = []
            self._seen = bytearray(len(self._parameters))
            self._pending = [len(expected) for expected in self._expected]
        if content_of(self._parameters) != self._content:  # torch.utils.swap_tensors has taken the hooks along
            self._keep_hooks(frozenset())
            self._content = content_of(self._parameters)
        self._keep_hooks(frozenset(self._bucket_of) if self._every or hook_all else self._triggers)

    def hook_all(self) -> None:
        """Hear of every gradient until a backward begins, as this one need not reach the parameters with a hook."""
        self._keep_hooks(frozenset(self._bucket_of))

    def arrived(self, index: int) -> None:
        """A gradient was accumulated into parameter `index`."""
        if not self._every:
            return
        self.observed.append(index)
        if not self._seen[index]:
            self._seen[index] = True
            if self._missed[index] < PATIENCE:
                self._pending[self._bucket_of[index]] -= 1

    def comes_last(self, index: int) -> bool:
        """Whether all other hooks of parameter `index` have run, inside its own; else ours runs after them from now on.

        Users may register hooks at any time, which are to find the gradient and may change it. In the first backward
        with such a hook the bucket is launched when the next gradient arrives, or at the end.
        """
        return index in self._handles and comes_last(self._handles[index], ArrivalHook)

    def complete(self, number: int) -> list[Tensor | None] | None:
        """Return the gradients of bucket `number` if all expected ones are there; None if not, or after the last."""
        if number == len(self._layout):
            return None
        indices, expected, parameter_at = self._layout[number], self._expected[number], self._parameters.__getitem__
        # Most buckets are asked for before anything of them has come.
        if self._pending[number] if self._every else expected and parameter_at(expected[-1]).grad is None:
            return None
        # A gradient that Python has not seen before costs as much as its copy, so all are read once.
        gradients = gradients_of(map(parameter_at, indices))
        if not self._every:
            awaited = gradients
            if len(expected) < len(indices):
                awaited = gradients_of(map(parameter_at, expected))
            if any_missing(awaited):
                return None
        return gradients

    def end(self, absent: Sequence[int]) -> None:
        """A backward has ended, without gradients for the `absent` parameters on this rank."""
        if not absent and self.expects_all:  # as in most backwards
            return
        self.expects_all = not absent
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
        self._expected = [[index for index in indices if self._missed[index] < PATIENCE] for indices in self._layout]
        self._triggers = frozenset(
            max(expected, key=self._place.__getitem__) for expected in self._expected if expected
        )

    def _keep_hooks(self, wanted: frozenset[int]) -> None:
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
