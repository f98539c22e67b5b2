"""The parameters of a wrapper's module, and changes of them after the module was wrapped.

A new head, an adapter, an unfrozen parameter, ``load_state_dict(assign=True)``, ``model.to(dtype)``: none of these
calls the wrapper, so the wrapper looks at the module when a synchronized backward begins.

A rank that finds other parameters first runs a round of the collectives of a backward with zeros, and says so in its
control block (:meth:`.Reducer.follow_module`). If all ranks do, they compare names, shapes, dtypes and the new values,
and each rebuilds its buckets. A rank without a change meets the round in its own backward, so a change on one rank
alone is an error on all of them and leaves no rank waiting.

Decision 0013 says why.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from paceline.core.state.unwrapping import plain_name
from paceline.core.torch_internals.autograd import current_task
from paceline.core.torch_internals.distributed.dtensor import as_local, release
from paceline.ddp.consistency.initial_sync import check_same_change
from paceline.ddp.options.module_checks import check_averaged
from paceline.ddp.transport.channel import Channel
from paceline.ddp.transport.finisher import AllReduce, Finisher
from paceline.ddp.transport.sparse import sparse_by_layer
from paceline.errors import UsageError

Named = list[tuple[str, nn.Parameter]]
OnChange = Callable[[Named, bool], None]
"""Function that takes all parameters to average, and whether they are averaged by now."""
Form = tuple[torch.Size, torch.dtype, torch.device]
_requires_grad, _look = attrgetter("requires_grad"), attrgetter("shape", "dtype")


@dataclass(frozen=True)
class Change:
    """The difference between the module's parameters and the averaged ones."""

    named: Named
    """All parameters to average from now on, in the module's order."""
    new: Named
    """Parameters that are not averaged yet, or whose shape, dtype or device has changed."""


class ModuleWatch:
    """Notices that a wrapper's module has other parameters than the averaged ones.

    Args:
        modules: the wrapper's ``_modules``, so that a new ``model.module`` is noticed as well.
        ignored: names of parameters that are not averaged; names that the module adds later are added.
        trained: the parameters that are averaged.
    """

    def __init__(self, modules: dict[str, Any], ignored: set[str], trained: Named) -> None:
        self._modules, self._ignored = modules, ignored
        self.change: Change | None = None
        """How the module differs from the parameters that are averaged, when it was last looked at."""
        self.changes = 0
        """Times that the module was found to be another than before."""
        self._looked_in = -1  # the graph task of the last look
        self.follow(trained)

    @property
    def module(self) -> nn.Module:
        module: nn.Module = self._modules["module"]
        return module

    def named_parameters(self) -> Named:
        """Return the parameters as they are now, without the ignored ones."""
        named = self.module.named_parameters()
        return [(plain_name(name), parameter) for name, parameter in named if name not in self._ignored]

    def untrained(self) -> str | None:
        """Return the name of a parameter that has a gradient and is not averaged, as its name is ignored, or None."""
        named = self.module.named_parameters()
        return next((name for name, parameter in named if parameter.requires_grad and name in self._ignored), None)

    def follow(self, trained: Named) -> None:
        """Expect the module to have the parameters `trained`, which are averaged from now on."""
        self._trained = [parameter for _, parameter in trained]  # kept alive, so that no other object gets their ids
        self._forms = {id(parameter): _form(parameter) for parameter in self._trained}
        self.change = None
        self._remember()

    def detect(self) -> Change | None:
        """Return how the module has changed; None without new parameters to average."""
        task = current_task()
        # Once in each graph task: a module does not change inside one, and hooks may ask for every output.
        if task == self._looked_in != -1:
            return self.change
        self._looked_in = task
        # A change that is not averaged yet may have been undone, such as by freezing, which _differs() does not see.
        if self.change is not None or self._differs():
            self.change = self._find()
            self._remember()
        return self.change

    def unchanged(self) -> Change:
        """Return the averaged parameters, for a rank that has no change to compare with other ranks."""
        return Change([pair for pair in self.named_parameters() if id(pair[1]) in self._forms], [])

    def sparse(self, parameters: Sequence[nn.Parameter]) -> frozenset[int]:
        """Return the indices of those `parameters` whose layer gives sparse gradients."""
        ids = sparse_by_layer(self.module)
        return frozenset(index for index, parameter in enumerate(parameters) if id(parameter) in ids)

    def _find(self) -> Change | None:
        self._ignored |= set(getattr(self.module, "_ddp_params_and_buffers_to_ignore", ()))
        # A tensor that functional_call puts in a parameter's place for a while is not a leaf, or is gone afterwards.
        named = [
            (name, parameter)
            for name, parameter in self.named_parameters()
            if not is_lazy(parameter)
            and parameter.is_leaf
            and (parameter.requires_grad or id(parameter) in self._forms)
        ]
        new = [(name, parameter) for name, parameter in named if self._forms.get(id(parameter)) != _form(parameter)]
        return Change(named, new) if new else None

    # -- a comparison that costs next to nothing -----------------------------------------------------------------

    def _remember(self) -> None:
        self.changes += 1
        parts = list(self.module.modules())
        self._dicts: list[dict[str, Any]] = [self._modules, *(part._modules for part in parts)]
        self._dicts += [part._parameters for part in parts]
        self._copies = [dict(children) for children in self._dicts]
        # Dicts compare values by identity first, then by ==, which for tensors gives a tensor: its truth value is an
        # error, unless it has one element. So parameters of one element are compared by identity, one by one.
        self._single = [
            (part._parameters, key, value)
            for part in parts
            for key, value in part._parameters.items()
            if value is not None and not is_lazy(value) and value.numel() == 1
        ]
        named = self.named_parameters()
        self._others = [
            parameter for _, parameter in named if id(parameter) not in self._forms and not parameter.requires_grad
        ]
        self._looks = list(map(_look, self._trained))
        self._device = self._trained[0].device

    def _differs(self) -> bool:
        try:
            if self._dicts != self._copies:
                return True
        except Exception:  # == of two different tensors, which has no truth value
            return True
        return (
            any(held[key] is not value for held, key, value in self._single)
            or any(map(_requires_grad, self._others))
            or list(map(_look, self._trained)) != self._looks
            or self._trained[0].device != self._device  # a module is moved as a whole
        )


def _form(parameter: Tensor) -> Form:
    return parameter.shape, parameter.dtype, parameter.device


def find_refusal(change: Change, channel: Channel, finisher: Finisher, device: torch.device) -> UsageError | None:
    """Return the error for a `change` that is not the same on all ranks or cannot be taken in; called by all ranks."""
    try:
        check_same_change(channel, change.named, change.new)
        check_averaged(change.named)
    except UsageError as error:
        return error
    if not isinstance(finisher, AllReduce):
        return UsageError(
            f"parameters such as {change.new[0][0]!r} were added to the module after a communication hook was "
            "registered, whose state may not fit them; wrap the module again and register the hook with the new wrapper"
        )
    devices = sorted({str(parameter.device) for _, parameter in change.named} | {str(device)})
    if len(devices) > 1:
        return UsageError(
            f"parameters of the module were moved to another device or added there after it was wrapped "
            f"({', '.join(devices)}); move the whole module to one device and wrap it again"
        )
    return None


class Trained:
    """The parameters that are averaged, by their index in the module's order.

    The object lives as long as the wrapper. Its lists are replaced between two backwards, when the module has got other
    parameters.
    """

    names: list[str]
    """Names of the parameters."""
    originals: list[nn.Parameter]
    """Parameters as the module holds them."""
    parameters: list[nn.Parameter]
    """Parameters whose ``grad`` is averaged; for a DTensor, a parameter over this rank's shard."""

    def __init__(self, named: Named) -> None:
        self.use(named)

    def use(self, named: Named) -> None:
        self.names, self.originals = [name for name, _ in named], [parameter for _, parameter in named]
        self.parameters = [as_local(parameter) for parameter in self.originals]

    def release(self) -> None:
        """Remove the hooks on DTensors, which lay out their gradients for the reducer."""
        for parameter in self.parameters:
            release(parameter)
