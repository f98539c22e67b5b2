"""Gradients of mean losses, inside ``model.weight(n, reduction="mean")``, multiplied by n to be those of the sum.

They are multiplied where they arrive at the wrapper's parameters, not where backward enters through its outputs. So a
wrapper whose output is its own next input multiplies once, two wrappers in a chain each multiply their own gradients,
and a penalty on parameters that is a part of the loss is multiplied with it.
"""

from __future__ import annotations

import weakref
from functools import partial

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle, unserializable_hook

from paceline.comm.forking import finalize
from paceline.ddp.agreement.ledger import Ledger
from paceline.ddp.consistency.module_changes import ModuleWatch
from paceline.ddp.extensions.sharing import find_partners
from paceline.errors import UsageError


class MeanLosses:
    """Multiplies gradients as they arrive, from the first block with a mean loss on."""

    def __init__(self, watch: ModuleWatch, ledger: Ledger) -> None:
        self._watch, self._ledger = watch, ledger
        self._hooked: dict[int, tuple[weakref.ref[Tensor], RemovableHandle]] = {}  # by the parameter's id
        finalize(self, _remove, self._hooked)

    def hook_parameters(self) -> None:
        """Hook the wrapper's parameters that are not hooked yet."""
        for _, parameter in self._watch.named_parameters():
            hooked = self._hooked.get(id(parameter))
            if parameter.requires_grad and (hooked is None or hooked[0]() is not parameter):
                # Marked, because torch warns when a tensor with any other hook is pickled.
                arrives = unserializable_hook(partial(_multiplied, self._ledger, weakref.ref(parameter)))
                self._hooked[id(parameter)] = weakref.ref(parameter), parameter.register_hook(arrives)


def _remove(hooked: dict[int, tuple[weakref.ref[Tensor], RemovableHandle]]) -> None:
    for _, handle in hooked.values():
        handle.remove()


def _multiplied(ledger: Ledger, to: weakref.ref[Tensor], gradient: Tensor) -> Tensor | None:
    """Return the gradient to accumulate in place of `gradient`; None to leave it as it is."""
    parameter = to()
    if parameter is None:
        return None
    partners = find_partners(parameter, ledger)
    factor = ledger.factor(parameter, is_common=bool(partners))
    if factor == 1:
        return None
    if any(partner.is_under_way for partner in partners):
        raise UsageError(
            "one backward runs through two DistributedDataParallel that share a parameter, whose gradient is one sum, "
            'and model.weight(…, reduction="mean") would multiply the part of both; use summed losses there'
        )
    # A mean over no items is NaN; times a weight of 0 it would stay NaN.
    return gradient * factor if factor else torch.zeros_like(gradient)
