"""The parameters that a wrapper averages."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from paceline.core.torch_internals.distributed.dtensor import as_local, release
from paceline.ddp.consistency.module_changes import Named


class Trained:
    """The parameters that are averaged, by their index in the module's order.

    The object lives as long as the wrapper. Its lists are replaced between two backwards, when the module has got other
    parameters.
    """

    names: list[str]
    """Names of the parameters."""
    originals: list[nn.Parameter]
    """Parameters as the module holds them."""
    local: list[nn.Parameter]
    """Parameters, in place of a DTensor a parameter over this rank's shard."""
    parameters: list[nn.Parameter]
    """Parameters whose ``grad`` a backward reads and sets: those of `local`, or placeholders while the module has
    others in their place."""

    def __init__(self, named: Named) -> None:
        self.use(named)

    def use(self, named: Named) -> None:
        """Hold the parameters `named` from now on."""
        self.names, self.originals = [name for name, _ in named], [parameter for _, parameter in named]
        self.local = [as_local(parameter) for parameter in self.originals]
        self.parameters = list(self.local)

    def replace(self, placeholders: Sequence[nn.Parameter]) -> None:
        """Use `placeholders`, one for each parameter, whose gradients backwards then read and set."""
        self.parameters[:] = placeholders  # in place: buckets, arrivals and others hold this list

    def release(self) -> None:
        """Remove the hooks on DTensors, which lay out their gradients for the reducer."""
        for parameter in self.local:
            release(parameter)
