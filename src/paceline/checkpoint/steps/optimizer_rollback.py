"""Rolls back optimizer steps that are followed by another backward pass in the same training step.

If each backward pass of a training step has its own optimizer (as in adversarial training), a rank can end during the
second backward pass, after the first optimizer has stepped on all ranks. The first optimizer and its parameters are
therefore copied before it steps. Copies are not needed for optimizers that step back to back, or for the last optimizer
of a training step. Once new gradients have arrived between two optimizer steps of a training step, later training steps
make copies.
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
    """The optimizer steps of the current training step, and their rollback."""

    def __init__(self) -> None:
        self._early: set[int] = set()
        """Optimizers that stepped before another backward pass, by id."""
        self._stepped: list[int] = []
        """Optimizers that have stepped or are about to step, by id."""
        self._seen: dict[int, list[tuple[Callable[[], Any], int]]] = {}
        """Gradients of the registered optimizers at the latest optimizer step, by the optimizer's id."""
        self.copies: dict[int, _Copy] = {}
        """Copies of optimizers before their steps, by id."""

    @property
    def has_begun(self) -> bool:
        """Whether an optimizer has stepped or is about to step."""
        return bool(self._stepped)

    @property
    def can_go_back(self) -> bool:
        """Whether all steps can be rolled back."""
        return self.copies.keys() >= set(self._stepped)

    def has_new_gradients(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether no optimizer has stepped yet, or `optimizer` has new gradients since the last step."""
        if not self.has_begun or id(optimizer) not in self._seen:
            return not self.has_begun
        earlier = [(gradient(), version) for gradient, version in self._seen[id(optimizer)]]
        current = [(gradient(), version) for gradient, version in _gradients(optimizer)]
        pairs = itertools.zip_longest(earlier, current, fillvalue=(None, -1))
        return any(old is not new or old_version != version for (old, old_version), (new, version) in pairs)

    def step(self, optimizer: torch.optim.Optimizer, registered: list[torch.optim.Optimizer]) -> None:
        """Record that `optimizer`, which is in `registered`, is about to step."""
        if self.has_begun and self.has_new_gradients(optimizer):
            self._early.update(self._stepped)
        # If an earlier step cannot be rolled back, further copies are useless.
        if id(optimizer) in self._early and self.can_go_back and id(optimizer) not in self.copies:
            self.copies[id(optimizer)] = _Copy(optimizer)
        self._stepped.append(id(optimizer))
        self._seen = {id(other): _gradients(other) for other in registered} if len(registered) > 1 else {}

    def version_of(self, parameter: torch.Tensor) -> int:
        """Return the version counter of `parameter` before any optimizer stepped."""
        versions = (copied.versions.get(parameter) for copied in self.copies.values())
        return next((version for version in versions if version is not None), parameter._version)

    def go_back(self) -> None:
        """Roll optimizers and their parameters back."""
        for copied in self.copies.values():
            copied.put_back()

    def end(self) -> None:
        """Begin the next training step."""
        self._stepped, self.copies = [], {}


class _Copy:
    """Parameters and state of an optimizer before it steps."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self.versions = {parameter: parameter._version for parameter in parameters(optimizer)}
        self._values = {parameter: parameter.detach().clone() for parameter in self.versions}
        self._state = {parameter: copy.deepcopy(state) for parameter, state in optimizer.state.items()}

    def put_back(self) -> None:
        with torch.no_grad():
            for parameter, value in self._values.items():
                parameter.copy_(value)
        # In place, because torch needs its own defaultdict.
        self._optimizer.state.clear()
        self._optimizer.state.update(self._state)


def _nothing() -> None:
    pass


def _gradients(optimizer: torch.optim.Optimizer) -> list[tuple[Callable[[], Any], int]]:
    """Return a weak reference and the version counter of each gradient."""
    gradients = [parameter.grad for parameter in parameters(optimizer)]
    # Weak, so that zero_grad() frees them. An id could be reused by a new gradient.
    return [(_nothing, 0) if gradient is None else (weakref.ref(gradient), gradient._version) for gradient in gradients]
