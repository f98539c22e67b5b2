"""The end of a training step, at which everything registered is consistent, and the way back to it.

Parameters and the states of optimizers stay as they are until the next optimizer step, so nothing of them is copied.
What changes in between is: settings of optimizers, small buffers of modules, and the states of all other objects; these
copies are small, see :mod:`paceline.checkpoint.frozen`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import torch

from paceline.checkpoint import capture
from paceline.checkpoint.frozen import Kept, freeze_object, parameters_of, stored_buffers, thaw_object
from paceline.checkpoint.gate import Gate
from paceline.checkpoint.registered import Registered
from paceline.unwrapping import Accumulates, joins


class Boundary:
    """The last step boundary of this rank.

    Args:
        entries: gives the registered objects.
        gate: where ranks wait for each other; None where nobody could use what they store.
    """

    def __init__(self, entries: Callable[[], list[Registered]], gate: Gate | None) -> None:
        self.step = 0
        """Optimizer steps done."""
        self.wish = 0
        """Of this rank, for the steps to come, as bits."""
        self.wishes = 0
        """Of all ranks, at the last step."""
        self._entries, self._gate = entries, gate
        self._is_armed = False
        """Whether :meth:`mark` was called, from where on optimizers wait for the other ranks."""
        self._is_turned = False
        """Whether an optimizer has stepped since the boundary, or is about to."""
        self._hooks: dict[int, Any] = {}
        """Handles of the hooks of optimizers, by the optimizer's id."""
        self._frozen: dict[str, Any] | None = None
        """What was copied at the boundary, by the name of the object; None if nothing was."""
        self._parameters: list[Kept] = []
        """Of all modules and optimizers, at the boundary."""
        self._process = os.getpid()

    @property
    def gate(self) -> Gate | None:
        """The gate; None if there is none, or it is of no use any more."""
        return self._gate

    @property
    def can_be_saved(self) -> bool:
        """Whether :meth:`states` can tell the states of all shared objects at the boundary."""
        return self._frozen is not None and not self._is_turned

    @property
    def joins(self) -> bool:
        """Whether this is inside ``join``, where ranks take different numbers of steps."""
        return any(joins(entry.object) for entry in self._entries())

    def watch(self, entry: Registered) -> None:
        """Notice the steps of `entry`, if it is an optimizer."""
        if isinstance(entry.object, torch.optim.Optimizer) and id(entry.object) not in self._hooks:
            self._hooks[id(entry.object)] = entry.object.register_step_pre_hook(self._optimizer_steps)

    def go_on_from(self, step: int) -> None:
        """Take `step` for the number of steps done; everything registered is as of its end."""
        self.step, self._is_turned, self._frozen = step, False, None

    def mark(self) -> bool:
        """Mark that everything registered is consistent; returns whether this ends an optimizer step.

        It does not while gradients accumulate, and after a step that a GradScaler has skipped.

        Raises:
            CommunicationError: if a rank has ended.
        """
        entries = self._entries()
        is_first, self._is_armed = not self._is_armed, True
        if _accumulates(entries) or (self._hooks and not self._is_turned and not is_first):
            return False
        is_step = self._is_turned or not self._hooks
        self.step += is_step
        if self._gate is not None and _is_of_no_use(entries, bool(self._hooks)):
            self._leave_gate()
        if self._gate is not None:
            own, buffers = _own(entries), stored_buffers(entries)
            if is_first:  # the optimizer has not waited
                self.wishes = self._gate.prepare(self.step, own, buffers, self.wish)
            self._frozen = {entry.name: freeze_object(entry) for entry in entries if not entry.per_rank}
            self._parameters = [Kept.of(parameter) for parameter in parameters_of(entries)]
            self._gate.complete(self.step, own, buffers)
        self._is_turned = False
        return is_step

    def states(self) -> Iterator[Registered]:
        """Yield the objects that all ranks share, with the states that they had at the boundary.

        This ends the training, because modules and optimizers are changed back in place.

        Raises:
            CheckpointError: if something has changed that was not copied.
        """
        assert self._frozen is not None
        for kept in self._parameters:
            kept.unchanged("a parameter")
        for entry in self._entries():
            if not entry.per_rank:
                yield thaw_object(entry, self._frozen[entry.name])

    def retire(self) -> None:
        """Let optimizers step without waiting, after which :meth:`states` can tell nothing."""
        self._is_armed = False

    def close(self) -> None:
        """Let optimizers step without being noticed."""
        for handle in self._hooks.values():
            handle.remove()
        self._hooks.clear()
        self._frozen, self._parameters = None, []

    def _optimizer_steps(self, *_: Any) -> None:
        if self._is_turned or os.getpid() != self._process:
            return
        if self._is_armed and self._gate is not None:
            entries = self._entries()
            if _is_of_no_use(entries, True):
                self._leave_gate()
            else:
                own, buffers = _own(entries), stored_buffers(entries)
                self.wishes = self._gate.prepare(self.step + 1, own, buffers, self.wish)
        self._is_turned = True

    def _leave_gate(self) -> None:
        assert self._gate is not None
        self._gate.record.step_alone()
        self._gate, self._frozen, self._parameters = None, None, []


def _own(entries: list[Registered]) -> capture.Capture:
    return capture.own(entry for entry in entries if entry.per_rank)


def _accumulates(entries: list[Registered]) -> bool:
    return any(isinstance(entry.object, Accumulates) and entry.object.holds_local_gradients() for entry in entries)


def _is_of_no_use(entries: list[Registered], has_optimizer: bool) -> bool:
    """Whether the surviving ranks could not tell what the others need.

    Inside ``join`` ranks take different numbers of steps; without a registered optimizer nobody says when parameters
    change; and on a GPU the host is ahead of what the device has computed.
    """
    if not has_optimizer or any(parameter.device.type != "cpu" for parameter in parameters_of(entries)[:1]):
        return True
    return any(joins(entry.object) for entry in entries)
