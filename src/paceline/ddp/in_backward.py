"""Optimizers that torch's ``_apply_optimizer_in_backward`` has tied to parameters, run on averaged gradients.

Left alone they step as soon as a parameter has its gradient, which is this rank's own. Here they step at the end of a
synchronized backward, and the gradients become None, as with torch DDP; a backward under ``no_sync`` accumulates.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn


class InBackward:
    """The parameters among `parameters` that have such an optimizer; they are taken off autograd's own hooks."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = [parameter for parameter in parameters if hasattr(parameter, "_in_backward_optimizers")]
        if not self._parameters:
            return
        # Not imported before somebody uses it: it loads TorchScript, which warns that it is deprecated.
        from torch.distributed.optim.apply_optimizer_in_backward import param_to_optim_hook_handle_map

        for parameter in self._parameters:
            for handle in param_to_optim_hook_handle_map.get(parameter, []):
                handle.remove()

    def __bool__(self) -> bool:
        return bool(self._parameters)

    def step(self) -> None:
        """Step them, where there is a gradient."""
        for parameter in self._parameters:
            if parameter.grad is not None:
                for optimizer in parameter._in_backward_optimizers:
                    optimizer.step()
                parameter.grad = None
