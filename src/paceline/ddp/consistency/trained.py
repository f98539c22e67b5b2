"""The parameters that a wrapper averages."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from paceline.core.torch_internals.distributed.dtensor import as_local, release
from paceline.ddp.consistency.module_changes import Named


class Trained:
    """The parameters that are averaged, by their index in the module's order.

    The object stays as long as the wrapper; what it holds is replaced between two backwards, when the module has got
    other parameters.
    """

    names: list[str]
    """Names of the parameters."""
    given: list[nn.Parameter]
    """The parameters as the module holds them."""
    local: list[nn.Parameter]
    """The same; for a DTensor what stands for this rank's shard."""
    parameters: list[nn.Parameter]
    """The same as `local`, but for stand-ins while the module has put others in their place. A backward reads and sets
    the ``grad`` of these."""

    def __init__(self, named: Named) -> None:
        self.use(named)

    def use(self, named: Named) -> None:
        """Take the parameters `named`."""
        self.names, self.given = [name for name, _ in named], [parameter for _, parameter in named]
        self.local = [as_local(parameter) for parameter in self.given]
        self.parameters = list(self.local)

    def replace(self, stand_ins: Sequence[nn.Parameter]) -> None:
        """Read and set the gradients of `stand_ins`, one for each parameter."""
        self.parameters[:] = stand_ins

    def release(self) -> None:
        """Take off what stands for shards of DTensors."""
        for parameter in self.local:
            release(parameter)
