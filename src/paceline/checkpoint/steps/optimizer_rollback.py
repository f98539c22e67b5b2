"""Optimizer steps between two boundaries, and the rollback of those that are followed by another backward.

If a training step has several backwards, each with its own optimizer (adversarial training, for example), a rank may
end in the second backward when the first optimizer has already stepped on all ranks. So the parameters and state of
that optimizer are copied before it steps. Optimizers that step directly one after the other, and the last one, need no
copies. Gradients show this: if new ones arrive between two optimizer steps of a training step, the following training
steps make copies.
"""

from __future__ import annotations

import copy
import itertools
import weakref
from collections.abc import Callable
from typing import Any

import torch

from paceline.checkpoint.objects.optimizer_states import parameters


class OptimizerRollback:
    """The optimizer steps of the current training step, since the last boundary, and the way back from them."""

    def __init__(self) -> None:
        self._early: set[int] = set()
        """Optimizers that stepped before another backward in an earlier training step, by id."""
        self._stepped: list[int] = []
        """Optimizers that have stepped in this training step, or are about to, by id."""
        self._seen: dict[int, list[tuple[Callable[[], Any], int]]] = {}
        """Gradients of the other optimizers when the latest one stepped, by the optimizer's id."""
        self.copies: dict[int, _Copy] = {}
        """Copies of optimizers from before they stepped, by id; of all of them if :attr:`can_go_back`."""

    @property
    def has_begun(self) -> bool:
        """Whether an optimizer has stepped, or is about to."""
        return bool(self._stepped)

    @property
    def can_go_back(self) -> bool:
        """Whether everything can be rolled back to the boundary."""
        return self.copies.keys() >= set(self._stepped)

    def has_new_gradients(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether no optimizer has stepped, or this one had a backward since the latest step."""
        if not self.has_begun or id(optimizer) not in self._seen:
            return not self.has_begun
        before = [(gradient(), version) for gradient, version in self._seen[id(optimizer)]]
        now = [(gradient(), version) for gradient, version in _gradients(optimizer)]
        pairs = itertools.zip_longest(before, now, fillvalue=(None, -1))
        return any(one is not other or count != version for (one, count), (other, version) in pairs)

    def step(self, optimizer: torch.optim.Optimizer, registered: list[torch.optim.Optimizer]) -> None:
        """Note that `optimizer`, one of those `registered`, steps now."""
        if self.has_begun and self.has_new_gradients(optimizer):
            self._early.update(self._stepped)
        # Without a copy of an earlier one there is no way back in this step, so a further copy would be of no use.
        if id(optimizer) in self._early and self.can_go_back and id(optimizer) not in self.copies:
            self.copies[id(optimizer)] = _Copy(optimizer)
        self._stepped.append(id(optimizer))
        self._seen = {id(other): _gradients(other) for other in registered} if len(registered) > 1 else {}

    def version_of(self, parameter: torch.Tensor) -> int:
        """Return the version counter of `parameter` before any optimizer stepped."""
        found = (each.versions.get(parameter) for each in self.copies.values())
        return next((version for version in found if version is not None), parameter._version)

    def go_back(self) -> None:
        """Roll parameters and optimizers back to the boundary."""
        for each in self.copies.values():
            each.put_back()

    def end(self) -> None:
        """Begin the next training step."""
        self._stepped, self.copies = [], {}


class _Copy:
    """Parameters and state of an optimizer before it steps."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self.versions = {parameter: parameter._version for parameter in parameters(optimizer)}
        """Version counters of the parameters."""
        self._values = {parameter: parameter.detach().clone() for parameter in self.versions}
        self._state = {parameter: copy.deepcopy(state) for parameter, state in optimizer.state.items()}

    def put_back(self) -> None:
        """Restore the optimizer and its parameters."""
        with torch.no_grad():
            for parameter, value in self._values.items():
                parameter.copy_(value)
        # In place, because torch needs its own defaultdict there.
        self._optimizer.state.clear()
        self._optimizer.state.update(self._state)


def _nothing() -> None:
    pass


def _gradients(optimizer: torch.optim.Optimizer) -> list[tuple[Callable[[], Any], int]]:
    """Return the identity and version counter of each gradient, which show whether gradients have changed."""
    found = [parameter.grad for parameter in parameters(optimizer)]
    # Weak, because zero_grad() should free them; an id alone might belong to a new gradient by then.
    return [(_nothing, 0) if each is None else (weakref.ref(each), each._version) for each in found]
