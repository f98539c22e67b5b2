"""The optimizers' steps: counted for the control block, and refused where gradients were never averaged."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from paceline.ddp.ledger import Ledger
from paceline.ddp.reducer import Reducer
from paceline.errors import UsageError


class StepGuard:
    """Watches every optimizer that trains one of the reducer's parameters."""

    def __init__(self, reducer: Reducer, ledger: Ledger) -> None:
        self._reducer, self._ledger = reducer, ledger
        self._ours = {id(parameter) for parameter in reducer.parameters}
        self._synchronizations_seen: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()
        self._handles = [
            register_optimizer_step_pre_hook(self._before),
            register_optimizer_step_post_hook(self._after),
        ]

    def _before(self, optimizer: Optimizer, *_: Any) -> None:
        """Refuse a step with local gradients: backward went past the wrapper, or was under ``no_sync`` to its end.

        Raises:
            UsageError: names a parameter.
        """
        if not self._trains_ours(optimizer):
            return
        synchronizations = self._ledger.synchronizations
        if synchronizations == self._synchronizations_seen.get(optimizer, 0):
            name = self._reducer.local_gradient()
            if name is not None:
                raise UsageError(
                    f"optimizer.step() found a gradient of {name!r} that was not averaged over the ranks, as no "
                    "backward was synchronized since the last step; call the wrapper and not model.module, leave "
                    "no_sync() for the last micro-batch, or call model.sync_gradients() before the step"
                )
        self._synchronizations_seen[optimizer] = synchronizations

    def _after(self, optimizer: Optimizer, *_: Any) -> None:
        if self._trains_ours(optimizer):
            self._ledger.status.optimizer_steps += 1

    def _trains_ours(self, optimizer: Optimizer) -> bool:
        firsts = (group["params"][0] for group in optimizer.param_groups if group["params"])
        return any(id(parameter) in self._ours for parameter in firsts)

    def close(self) -> None:
        """Stop watching."""
        for handle in self._handles:
            handle.remove()
