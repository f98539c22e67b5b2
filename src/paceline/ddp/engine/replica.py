"""The replica: one rank's module from the wrapper's point of view, without any communication."""

from __future__ import annotations

import weakref
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle, unserializable_hook

from paceline.comm.forking import finalize
from paceline.core.state.unwrapping import plain_name
from paceline.ddp.agreement.ledger import Ledger
from paceline.ddp.consistency.buffers import Buffers
from paceline.ddp.consistency.module_changes import ModuleWatch, Named
from paceline.ddp.extensions.shared_parameters import find_partners
from paceline.ddp.options.config import Options
from paceline.ddp.options.module_checks import check_averaged, trained_parameters
from paceline.errors import UsageError


class MeanLosses:
    """Multiplies gradients as they arrive, starting with the first ``model.weight()`` block with a mean loss."""

    def __init__(self, watch: ModuleWatch, ledger: Ledger) -> None:
        self._watch, self._ledger = watch, ledger
        self._hooked: dict[int, tuple[weakref.ref[Tensor], RemovableHandle]] = {}  # keyed by the parameter's id
        finalize(self, _remove, self._hooked)

    def hook_parameters(self) -> None:
        for _, parameter in self._watch.named_parameters():
            hooked = self._hooked.get(id(parameter))
            if parameter.requires_grad and (hooked is None or hooked[0]() is not parameter):
                # Marked as unserializable, because torch warns about any other hook when a tensor is pickled.
                arrives = unserializable_hook(partial(_multiplied, self._ledger, weakref.ref(parameter)))
                self._hooked[id(parameter)] = weakref.ref(parameter), parameter.register_hook(arrives)


def _remove(hooked: dict[int, tuple[weakref.ref[Tensor], RemovableHandle]]) -> None:
    for _, handle in hooked.values():
        handle.remove()


def _multiplied(ledger: Ledger, to: weakref.ref[Tensor], gradient: Tensor) -> Tensor | None:
    """Return the gradient to accumulate instead of `gradient`, or None to leave it unchanged."""
    parameter = to()
    if parameter is None:
        return None
    partners = find_partners(parameter, ledger)
    factor = ledger.factor(parameter, is_common=bool(partners))
    if factor == 1:
        return None
    if any(partner.is_under_way for partner in partners):
        raise UsageError(
            "one backward pass runs through two DistributedDataParallel wrappers that share a parameter, so "
            'model.weight(…, reduction="mean") would multiply the gradients of both; use summed losses instead'
        )
    # A mean over no items is NaN, and multiplying it by a weight of 0 would leave it NaN.
    return gradient * factor if factor else torch.zeros_like(gradient)


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
    mean_losses: MeanLosses
    """Multiplies the gradients of mean losses in ``model.weight()`` blocks."""

    def __init__(self, modules: dict[str, Any], ignored: set[str]) -> None:
        trained = trained_parameters(modules["module"], ignored)
        check_averaged(trained)
        self.device = trained[0][1].device
        self.trained = [(plain_name(name), parameter) for name, parameter in trained]
        self.watch = ModuleWatch(modules, ignored, self.trained)
        self.buffers = Buffers(self.module, ignored, self.device)
        self._ignored = ignored
        self.ledger = Ledger()
        self.mean_losses = MeanLosses(self.watch, self.ledger)

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
