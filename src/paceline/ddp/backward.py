"""Forward passes of a wrapper that await their backward pass, and the tensors in their outputs."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any
from weakref import WeakSet

from torch import Tensor, nn

from paceline.core.telemetry.users_code import warn
from paceline.core.torch_internals.autograd import GraphTask, backward_call, current_task, queue_callback
from paceline.ddp.agreement.ledger import Ledger
from paceline.ddp.agreement.weight_block import Block


class Forward:
    """One forward pass. It lives as long as its autograd graph, because only the graph's hooks reference it.

    Args:
        block: the ``model.weight()`` block around the forward pass.
        counts_if_averaged: whether the forward pass was counted, but must not count if its backward pass stays local
            (``no_sync``).
    """

    is_empty = False
    """Whether it ran on the empty batch of a rank without samples."""

    def __init__(self, block: Block | None, *, counts_if_averaged: bool = False) -> None:
        self.block = block
        self.counts_if_averaged = counts_if_averaged


class PendingForwards:
    """The forward passes that await their backward pass.

    Args:
        ledger: counts the steps.
        reached: called as ``reached(forward, gradient)`` when a backward pass reaches an output.
    """

    is_unseen: bool
    """Whether a forward pass without an output to hook is waiting, such as one that stored its loss in the module."""
    may_be_empty = False
    """Whether a forward pass on an empty batch may be waiting."""
    ignored: weakref.ref[GraphTask] | None = None
    """The latest backward pass whose gradients are ignored; the reference restores ``p.grad`` after an exception."""

    def __init__(self, ledger: Ledger, reached: Callable[[Forward | None, Tensor], None]) -> None:
        self.is_unseen = False
        self._ledger = ledger
        self._differentiated_in = -1  # number of optimizer steps when derivatives were last taken
        self._reached = reached
        self._has_warned = False
        # Weak, so that the forward pass of a dropped loss does not wait forever.
        self._waiting: WeakSet[Forward] = WeakSet()
        # Forwards inside weight blocks that have no hooked output; without this list they would be garbage collected.
        self._unseen: list[Forward] = []

    def __bool__(self) -> bool:
        """Return whether a forward pass with hooked outputs, or derivatives of one, may still get a backward pass."""
        return bool(self._waiting) or self.are_differentiated

    def hook(self, outputs: Sequence[Tensor], forward: Forward) -> None:
        hooked = False
        for output in outputs:
            if output.grad_fn is not None:
                output.register_hook(partial(self._reached, forward))
                hooked = True
        if self._ledger.is_on_empty_slice:
            self.may_be_empty = forward.is_empty = True
        if hooked:
            self._waiting.add(forward)
        else:
            self.is_unseen = True
            if forward.block is not None:
                self._unseen = [item for item in self._unseen if item.block is not None and not item.block.is_claimed]
                self._unseen.append(forward)

    def may_have_ended_in(self, *, is_common: bool) -> bool:
        """Return whether a gradient may come from a backward pass that reached no hooked output.

        If the parameter `is_common` to several wrappers, the gradient may also come from another wrapper's backward
        pass.
        """
        return self.is_unseen or (bool(self) and (not is_common or self.are_differentiated))

    @property
    def are_differentiated(self) -> bool:
        """Whether derivatives were taken with ``create_graph`` since the last step, for example for a gradient penalty.

        A backward pass through these derivatives need not reach an output, and their graph may outlive the outputs'
        graph. But it cannot outlive an optimizer step, which changes the parameters saved in it.
        """
        return self._differentiated_in == self._ledger.status.optimizer_steps

    def backward_began(self, forward: Forward | None) -> None:
        """Stop waiting for the backward pass of `forward`, which has begun and creates no graph."""
        if forward is not None:
            self._waiting.discard(forward)

    def are_empty(self) -> bool:
        """Return whether all waiting forward passes ran on empty batches, so that their gradients do not count."""
        kinds = {forward.is_empty for forward in self._waiting}
        self.may_be_empty = True in kinds
        return kinds == {True}

    def ignore_gradients(self, parameters: Sequence[Tensor], elsewhere: Collection[int] = ()) -> None:
        """Restore each ``p.grad``, except of parameters `elsewhere`, when the running backward pass has ended."""
        kept = [(parameter, parameter.grad) for index, parameter in enumerate(parameters) if index not in elsewhere]
        for parameter, _ in kept:
            parameter.grad = None

        def ended(_: object) -> None:
            while kept:
                parameter, gradient = kept.pop()
                parameter.grad = gradient

        task = GraphTask()
        self.ignored, self._ledger.task = weakref.ref(task, ended), task.number
        queue_callback(partial(ended, task))

    def are_ignored(self) -> bool:
        """Whether gradients of the running backward pass are ignored."""
        task = None if self.ignored is None else self.ignored()
        return task is not None and task.number == current_task()

    def waiting_in(self, block: Block | None) -> int:
        return sum(forward.block is block for forward in self._waiting)

    def differentiated(self) -> None:
        self._differentiated_in = self._ledger.status.optimizer_steps

    def warn_of_graph(self) -> None:
        """Warn once about a synchronized ``backward(create_graph=True)``: averages have no graph, as in torch's DDP."""
        call = None if self._has_warned else backward_call()
        if call is None:
            return
        self._has_warned = True
        message = (
            "after backward(create_graph=True) p.grad is the average over the ranks, which has no graph and cannot be "
            "differentiated; take the derivatives first with torch.autograd.grad(loss, parameters, create_graph=True), "
            "and call backward() on the loss computed from them"
        )
        warn(message, call=call)

    def close(self) -> None:
        """Drop the reference to the reducer's function."""
        self._reached = _nothing  # it references the reducer


def _nothing(_forward: Forward | None, _gradient: Tensor) -> None:
    """A no-op that replaces the function of a closed reducer."""


def tensors_in(output: Any) -> list[Tensor]:
    """Return all tensors in a forward's output; searches nested containers, dataclasses and plain objects."""
    tensors: list[Tensor] = []
    # `visited` is needed because an object may contain itself.
    stack, visited = [output], set()
    while stack:
        value = stack.pop()
        if isinstance(value, Tensor):
            tensors.append(value)
        elif isinstance(value, list | tuple | set | frozenset):
            stack.extend(value)
        elif isinstance(value, dict):
            stack.extend(value.values())
        elif hasattr(value, "__dict__") and not isinstance(value, type | nn.Module) and id(value) not in visited:
            visited.add(id(value))
            stack.extend(vars(value).values())
    return tensors
