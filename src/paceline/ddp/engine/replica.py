"""The replica: one rank's module from the wrapper's point of view, without any communication."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from paceline.core.state.unwrapping import plain_name
from paceline.ddp.agreement.ledger import Ledger
from paceline.ddp.consistency.buffers import Buffers
from paceline.ddp.consistency.module_changes import ModuleWatch, Named
from paceline.ddp.options.config import Options
from paceline.ddp.options.module_checks import check_averaged, trained_parameters


class Replica:
    """Knows which parameters and buffers of a module are synchronized, and counts this rank's steps.

    Args:
        modules: the wrapper's ``_modules``, so that assigning a new ``model.module`` is detected too.
        ignored: names of parameters and buffers that are not synchronized.
    """

    device: torch.device
    """Device of the first parameter when the module was wrapped."""
    trained: Named
    """The parameters that are averaged."""
    watch: ModuleWatch
    """Detects when the module's parameters differ from `trained`."""
    buffers: Buffers
    """The buffers that are synchronized."""
    ledger: Ledger
    """Counts steps and adds up weights, which the control block reports to the other ranks."""

    def __init__(self, modules: dict[str, Any], ignored: set[str]) -> None:
        trained = trained_parameters(modules["module"], ignored)
        check_averaged(trained)
        self.device = trained[0][1].device
        self.trained = [(plain_name(name), parameter) for name, parameter in trained]
        self.watch = ModuleWatch(modules, ignored, self.trained)
        self.buffers = Buffers(self.module, ignored, self.device)
        self._ignored = ignored
        self.ledger = Ledger()

    @property
    def module(self) -> nn.Module:
        return self.watch.module

    def parameters(self) -> list[nn.Parameter]:
        return [parameter for _, parameter in self.trained]

    def all_parameters(self) -> list[nn.Parameter]:
        """Return all parameters of the module, averaged or not."""
        return list(self.module.parameters())

    def initial_tensors(self, options: Options) -> list[tuple[str, torch.Tensor]]:
        """Return the tensors that must be equal when averaging begins: parameters (including frozen ones) and
        buffers."""
        parameters = self.module.named_parameters()
        buffers = self.buffers.named().items() if options.syncs_initial_buffers else []
        return [*((name, tensor) for name, tensor in parameters if name not in self._ignored), *buffers]

    def adopt(self, named: Named) -> None:
        """From now on, average the parameters `named`, and synchronize the buffers that were added with them."""
        self.trained = named
        self.buffers.renew(self.module)
