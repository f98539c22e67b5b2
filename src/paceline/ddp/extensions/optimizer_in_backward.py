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
    """Steps the optimizers of parameters, which are looked for at the first forward, as by torch DDP.

    Args:
        parameters: returns the module's parameters.
        ledger: counts the steps.
    """

    def __init__(self, parameters: Callable[[], Sequence[nn.Parameter]], ledger: Ledger) -> None:
        self._parameters, self._ledger = parameters, ledger
        self._owners: list[nn.Parameter] | None = None

    def forward_ended(self) -> None:
        if self._owners is None:
            self._look()

    def parameters_changed(self) -> None:
        """Look at the parameters again; they may have been found in the middle of a step."""
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
        self.mark_stale()

    def is_active(self) -> bool:
        return bool(self._owners)

    def backward_ended(self, backward: Backward) -> None:
        """Step when averages are shown, unless an error is raised."""
        backward.reads_in_backward = True  # else, beside a GPU, they would step when somebody looks at gradients
        backward.deferred_last = [*backward.deferred_last, self.step]

    def step(self) -> None:
        """Step the optimizers where there is a gradient; all together are one optimizer step."""
        status = self._ledger.status
        # The step guard counts each of them, and ranks may differ in how many have a gradient.
        before = status.optimizer_steps
        for parameter in self._owners or ():
            if parameter.grad is not None:
                for optimizer in parameter._in_backward_optimizers:  # type: ignore[attr-defined]
                    optimizer.step()
                parameter.grad = None
        status.optimizer_steps = min(before + 1, status.optimizer_steps)
