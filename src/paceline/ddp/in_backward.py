"""Optimizers that step in backward, as ``torch.distributed.optim._apply_optimizer_in_backward`` attaches them."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

_OPTIMIZERS = "_in_backward_optimizers"  # where torch keeps a parameter's


def take_over(parameters: Sequence[nn.Parameter]) -> bool:
    """Take torch's hooks off, which would step with a gradient of this rank alone; returns whether there are any."""
    owners = [parameter for parameter in parameters if hasattr(parameter, _OPTIMIZERS)]
    if not owners:
        return False
    # Loaded by whoever attached them; slow to load for all others.
    from torch.distributed.optim.apply_optimizer_in_backward import param_to_optim_hook_handle_map

    for parameter in owners:
        for handle in param_to_optim_hook_handle_map.pop(parameter, []):
            handle.remove()
    return True


def step_averaged(parameters: Sequence[nn.Parameter]) -> None:
    """Step with the averages, and drop them, as torch does; a parameter without a gradient stays as it is."""
    for parameter in parameters:
        if parameter.grad is not None and hasattr(parameter, _OPTIMIZERS):
            for optimizer in getattr(parameter, _OPTIMIZERS):
                optimizer.step()
            parameter.grad = None
