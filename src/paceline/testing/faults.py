"""Fault injection for tests: kills or stops a rank during a forward pass, a backward pass or an optimizer step.

Works with any model, because it uses torch's global hooks.
"""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from paceline.errors import UsageError

MOMENTS = ("forward", "backward", "optimizer", "now")


@dataclass
class Order:
    """A fault to inject."""

    number: int
    """Signal number."""
    moment: str
    step: int
    """The fault happens when the rank reaches the moment for the `step`-th time."""


@dataclass
class Faults:
    """The faults of one rank."""

    rank: int
    size: int
    tell: Callable[[str], None]
    """Function that reports to the test process why this rank is about to end."""
    orders: list[Order] = field(default_factory=list)
    _times: Counter[str] = field(default_factory=Counter)
    """How many times the rank has reached each moment."""
    _depth: int = 0
    """Nesting depth of the running forward; only the outermost forward counts as a moment."""
    _stepping: int | None = None
    """Id of the optimizer whose step is running; the outermost one if steps are nested (ZeroRedundancyOptimizer)."""

    def kill(self, rank: int, at: str = "now", step: int = 1) -> None:
        """Kill `rank` (SIGKILL) when it reaches a moment for the `step`-th time.

        Every rank calls this method. The rank's death does not fail the test; the test checks how the other ranks
        react.

        Args:
            rank: the rank to kill.
            at: ``"forward"`` of the outermost module, ``"backward"`` through its output, ``"optimizer"`` before its
                step, or ``"now"``.
            step: which occurrence of the moment kills the rank, counted from 1 and from this call on.
        """
        self._order(rank, at, step, signal.SIGKILL)

    def hang(self, rank: int, at: str = "now", step: int = 1) -> None:
        """Stop `rank` forever (SIGSTOP). Takes the same arguments as :meth:`kill`."""
        self._order(rank, at, step, signal.SIGSTOP)

    def _hook(self) -> None:
        """Register the hooks that count the moments."""
        register_module_forward_pre_hook(self._before_forward)
        # called even if the forward pass raised
        register_module_forward_hook(self._after_forward, always_call=True)
        register_optimizer_step_pre_hook(self._before_step)
        register_optimizer_step_post_hook(self._after_step)

    def _order(self, rank: int, moment: str, step: int, number: int) -> None:
        if type(rank) is not int or not 0 <= rank < self.size:  # True is an int
            raise UsageError(f"rank {rank!r} does not exist; give one from 0 to {self.size - 1}")
        if moment not in MOMENTS:
            raise UsageError(f"at={moment!r} is unknown; give one of {', '.join(map(repr, MOMENTS))}")
        if type(step) is not int or step < 1:
            raise UsageError(f"step={step!r} is invalid; give a whole number above 0")
        if rank != self.rank:
            return
        if not self.orders:
            self._hook()
        self.orders.append(Order(number, moment, step + self._times[moment]))  # the step is counted from this call on
        if moment == "now":
            self._times[moment] += step - 1
            self._strike(moment)

    def _before_forward(self, module: nn.Module, _: Any) -> None:
        self._depth += 1
        if self._depth == 1 and module.training:
            self._stepping = None  # a step that raised did not reach its post-hook
            self._strike("forward")

    def _after_forward(self, module: nn.Module, _: Any, output: Any) -> None:
        self._depth -= 1
        if self._depth == 0 and module.training and self.orders:
            is_due = [True]

            def strike_once(_: Tensor) -> None:  # a backward pass through several outputs counts once
                if is_due:
                    is_due.clear()
                    self._strike("backward")

            for tensor in tensors_of(output):
                if tensor.requires_grad:
                    tensor.register_hook(strike_once)

    def _before_step(self, optimizer: Optimizer, *_: Any) -> None:
        if self._stepping is None:
            self._stepping = id(optimizer)
            self._strike("optimizer")

    def _after_step(self, optimizer: Optimizer, *_: Any) -> None:
        if self._stepping == id(optimizer):
            self._stepping = None

    def _strike(self, moment: str) -> None:
        self._times[moment] += 1
        for order in self.orders:
            if (order.moment, order.step) == (moment, self._times[moment]):
                name = signal.Signals(order.number).name
                self.tell(f"{name} at {moment!r}, occurrence {self._times[moment]}")
                os.kill(os.getpid(), order.number)


def tensors_of(value: Any) -> list[Tensor]:
    """Return the tensors in nested lists, tuples and dictionaries."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, Mapping):
        return [tensor for item in value.values() for tensor in tensors_of(item)]
    if isinstance(value, list | tuple):
        return [tensor for item in value for tensor in tensors_of(item)]
    return []
