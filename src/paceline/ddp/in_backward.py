"""Optimizers that step within backward, as torch's ``_apply_optimizer_in_backward`` puts them on parameters.

There they step as soon as a gradient is accumulated, which is this rank's own gradient. Here they step at the end of a
synchronized backward, over the average.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn


class InBackward:
    """The optimizers on some parameters; looked for when first asked to take over."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = parameters
        self._owners: list[nn.Parameter] | None = None

    def take_over(self) -> list[nn.Parameter]:
        """Have torch's hooks step these optimizers no more; returns the parameters that have any."""
        if self._owners is None:
            self._owners = [one for one in self._parameters if hasattr(one, "_in_backward_optimizers")]
            if self._owners:
                from torch.distributed.optim.apply_optimizer_in_backward import param_to_optim_hook_handle_map

                for parameter in self._owners:
                    for handle in param_to_optim_hook_handle_map.get(parameter, []):
                        handle.remove()
        return self._owners

    def step(self) -> None:
        """Step them, and set the gradients to None, as torch does."""
        for parameter in self.take_over():
            if parameter.grad is not None:
                for optimizer in parameter._in_backward_optimizers:  # type: ignore[attr-defined]
                    optimizer.step()
                parameter.grad = None
