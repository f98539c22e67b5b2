"""Optimizers that torch's ``_apply_optimizer_in_backward`` has tied to parameters, run on averaged gradients.

Left alone they step as soon as a parameter has its gradient, which is this rank's own. Here they step at the end of a
synchronized backward, and the gradients become None, as with torch DDP; a backward under ``no_sync`` accumulates.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import nn

from paceline.ddp.agreement.ledger import Ledger
from paceline.ddp.reducer.backward import Backward
from paceline.ddp.reducer.extension import Extension


class OptimizersInBackward(Extension):
    """Steps the optimizers that parameters have in backward, as found at the first forward, like torch DDP.

    Args:
        parameters: returns those of the module.
        ledger: counts the steps.
    """

    def __init__(self, parameters: Callable[[], Sequence[nn.Parameter]], ledger: Ledger) -> None:
        self._parameters, self._ledger = parameters, ledger
        self._owners: list[nn.Parameter] | None = None

    def forward_ended(self) -> None:
        """Look at the parameters after the first forward."""
        if self._owners is None:
            self._look()

    def renew(self) -> None:
        """Look again, at other parameters; they may have been found in the middle of a step."""
        if self._owners is not None:
            self._look()

    def _look(self) -> None:
        """Take the optimizers off autograd's own hooks."""
        self._owners = [parameter for parameter in self._parameters() if hasattr(parameter, "_in_backward_optimizers")]
        if self._owners:
            # Not imported before somebody uses it: it loads TorchScript, which warns that it is deprecated.
            from torch.distributed.optim.apply_optimizer_in_backward import param_to_optim_hook_handle_map

            for parameter in self._owners:
                for handle in param_to_optim_hook_handle_map.get(parameter, []):
                    handle.remove()
        self.changed()

    def is_active(self) -> bool:
        """Whether there are any."""
        return bool(self._owners)

    def at_end(self, backward: Backward) -> None:
        """Step when averages are shown, unless an error is raised."""
        backward.reads_at_once = True  # or they would step, beside a GPU, when somebody looks
        backward.last = [*backward.last, self.step]

    def step(self) -> None:
        """Step them, where there is a gradient; all together are one optimizer step."""
        status = self._ledger.status
        before = status.optimizer_steps
        for parameter in self._owners or ():
            if parameter.grad is not None:
                for optimizer in parameter._in_backward_optimizers:  # type: ignore[attr-defined]
                    optimizer.step()
                parameter.grad = None
        status.optimizer_steps = min(before + 1, status.optimizer_steps)
