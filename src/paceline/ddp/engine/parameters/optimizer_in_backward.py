"""Optimizers that torch's ``_apply_optimizer_in_backward`` has tied to parameters, run on averaged gradients.

Left alone they step as soon as a parameter has its gradient, which is this rank's own. Here they step at the end of a
synchronized backward, and the gradients become None, as with torch DDP; a backward under ``no_sync`` accumulates.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from paceline.ddp.agreement.ledger import Ledger
from paceline.errors import UsageError


class OptimizersInBackward:
    """Steps the optimizers that `parameters` have in backward, as found at the first forward, like torch DDP."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = parameters
        self._owners: list[nn.Parameter] | None = None

    def claim(self) -> list[nn.Parameter]:
        """Take the optimizers off autograd's own hooks, once; returns the parameters that have any."""
        if self._owners is None:
            self._owners = [
                parameter for parameter in self._parameters if hasattr(parameter, "_in_backward_optimizers")
            ]
            if self._owners:
                # Not imported before somebody uses it: it loads TorchScript, which warns that it is deprecated.
                from torch.distributed.optim.apply_optimizer_in_backward import param_to_optim_hook_handle_map

                for parameter in self._owners:
                    for handle in param_to_optim_hook_handle_map.get(parameter, []):
                        handle.remove()
        return self._owners

    def __bool__(self) -> bool:
        return bool(self.claim())

    def step(self, ledger: Ledger) -> None:
        """Step them, where there is a gradient; all together are one optimizer step in `ledger`."""
        before = ledger.status.optimizer_steps
        for parameter in self.claim():
            if parameter.grad is not None:
                for optimizer in parameter._in_backward_optimizers:  # type: ignore[attr-defined]
                    optimizer.step()
                parameter.grad = None
        ledger.status.optimizer_steps = min(before + 1, ledger.status.optimizer_steps)


def optimizer_inside(name: str) -> UsageError:
    """The error of an optimizer that steps inside a backward through two wrappers, which share parameter `name`."""
    return UsageError(
        f"one backward runs through two DistributedDataParallel that share {name!r}, and an optimizer steps "
        "inside it, which would see only one's part; use an optimizer outside of backward"
    )
