"""Parameters that the module gets after it was wrapped: noticed in backward, agreed on by all ranks, and taken in.

    backward begins ──► 1. look ──► 2. a new parameter has a gradient: flag in the control block
                                                │ on any rank
              5. taken into the buckets ◄── 4. average apart ◄── 3. compare on all ranks ──► refuse on all ranks

A new head, an adapter, a parameter that was frozen, ``load_state_dict(assign=True)``, ``model.to(dtype)``: nothing that
happens to a module calls the wrapper, so the wrapper looks when a synchronized backward begins. All ranks are told in
the control block, which every synchronized backward has, so that a change on one rank alone is an error on all of them
and leaves no one waiting. The first gradients are averaged outside the buckets; from the next backward on the new
parameters are like any other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from paceline.core.state.unwrapping import plain_name
from paceline.core.torch_internals.autograd import current_task
from paceline.core.torch_internals.distributed.dtensor import as_local, release
from paceline.ddp.consistency.initial_sync import describe_form
from paceline.ddp.transport.sparse import sparse_by_layer, stored_elements

Named = list[tuple[str, nn.Parameter]]
OnChange = Callable[[Named, bool], None]
"""Called with all parameters that are to be averaged, and whether they are by now."""
Form = tuple[torch.Size, torch.dtype, torch.device]
_trains, _look = attrgetter("requires_grad"), attrgetter("shape", "dtype")
DENSE, SPARSE, NON_FINITE = 1, 2, 4  # bits of what a rank says of its gradient; 0 for none


@dataclass
class Change:
    """How the parameters that the module has now differ from those that are averaged."""

    named: Named
    """All that are to be averaged from now on, in the module's order."""
    new: Named
    """Parameters that are not averaged yet, or whose shape, dtype or device has changed."""
    stand_ins: dict[int, nn.Parameter] = field(default_factory=dict)
    """By ``id`` of a parameter that took another form: one of the old form, which never has a gradient."""
    _locals: list[nn.Parameter] = field(init=False)
    _had_gradient: list[bool] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._locals = [as_local(parameter) for _, parameter in self.new]

    def begin(self) -> None:
        """A backward begins."""
        self._had_gradient = [parameter.grad is not None for parameter in self._locals]

    def restore(self) -> None:
        """An exception ended that backward: drop the gradients that it made."""
        for parameter, had_gradient in zip(self._locals, self._had_gradient, strict=True):
            if not had_gradient:
                parameter.grad = None

    def has_gradient(self) -> bool:
        """Whether one of the new parameters was used: one that never is, such as an average of weights, is no change.

        So a rank may keep modules of its own inside the model, as with torch DDP.
        """
        return any(parameter.grad is not None for parameter in self._locals)

    def described(self) -> list[list[str]]:
        """Every parameter's name and the facts that must be equal on all ranks, the new ones first, for messages."""
        new = {id(parameter) for _, parameter in self.new}
        usual = [[name, describe_form(parameter)] for name, parameter in self.named if id(parameter) not in new]
        return [[name, f"{describe_form(parameter)}, new"] for name, parameter in self.new] + usual

    def codes(self, *, check_finite: bool) -> list[int]:
        """Return a code for each new parameter's gradient: whether it is there, sparse, not finite."""
        codes = []
        for gradient in (parameter.grad for parameter in self._locals):
            code = 0 if gradient is None else SPARSE if gradient.is_sparse else DENSE
            if gradient is not None and check_finite and not torch.isfinite(stored_elements(gradient)).all():
                code |= NON_FINITE
            codes.append(code)
        return codes

    def gradients(self) -> dict[int, Tensor]:
        """This rank's gradients of the new parameters, by their index."""
        pairs = enumerate(parameter.grad for parameter in self._locals)
        return {index: gradient for index, gradient in pairs if gradient is not None}

    def targets(self, indices: Sequence[int]) -> dict[int, Tensor]:
        """Zeros for sums of the gradients of `indices`."""
        return {index: torch.zeros_like(self._locals[index].detach()) for index in indices}

    def show(self, averages: Mapping[int, Tensor]) -> None:
        """Let the new parameters' gradients be the averages, None where there is none."""
        for index, parameter in enumerate(self._locals):
            parameter.grad = averages.get(index)

    def close(self) -> None:
        """Remove the hooks from the parameters."""
        for parameter in self._locals:
            release(parameter)


class ModuleWatch:
    """Tells whether the parameters of a wrapper's module are still those that are averaged.

    Args:
        modules: the wrapper's ``_modules``, so that another ``model.module`` is noticed, too.
        ignored: names of parameters that are not averaged; names that the module adds later are added.
        delayed: parameters beside the module's own.
        trained: those that are averaged.
    """

    def __init__(
        self,
        modules: dict[str, Any],
        ignored: set[str],
        delayed: Sequence[tuple[str, nn.Parameter]],
        trained: Named,
    ) -> None:
        self._modules, self._ignored, self._delayed = modules, ignored, delayed
        self._change: Change | None = None
        self._looked_in = -1  # the graph task in which it looked last
        self.follow(trained)

    @property
    def module(self) -> nn.Module:
        """The module as it is now."""
        module: nn.Module = self._modules["module"]
        return module

    def named_parameters(self) -> Named:
        """The parameters as they are now, without the ignored ones."""
        own = list(self.module.named_parameters())
        seen = {id(parameter) for _, parameter in own}
        named = own + [(name, parameter) for name, parameter in self._delayed if id(parameter) not in seen]
        return [(plain_name(name), parameter) for name, parameter in named if name not in self._ignored]

    def follow(self, trained: Named) -> None:
        """Take `trained` for those that are averaged from now on."""
        self._trained = [parameter for _, parameter in trained]  # which keeps them alive, and so their ids their own
        self._forms = {id(parameter): _form(parameter) for parameter in self._trained}
        self._change = None
        self._remember()

    def detect(self) -> Change | None:
        """How the module has changed; None if nothing new is to be averaged. In each graph task it looks once."""
        task = current_task()
        if task == self._looked_in != -1:
            return self._change
        self._looked_in = task
        if self._differs():
            if self._change is not None:
                self._change.close()
            self._change = self._find()
            self._remember()
        return self._change

    def unchanged(self) -> Change:
        """The change of a rank that has none, to be compared with the others'."""
        named = [(name, parameter) for name, parameter in self.named_parameters() if id(parameter) in self._forms]
        return Change(named, [])

    def sparse(self, parameters: Sequence[nn.Parameter]) -> frozenset[int]:
        """Indices of those among `parameters` whose layer gives sparse gradients."""
        ids = sparse_by_layer(self.module)
        return frozenset(index for index, parameter in enumerate(parameters) if id(parameter) in ids)

    def _find(self) -> Change | None:
        self._ignored |= set(getattr(self.module, "_ddp_params_and_buffers_to_ignore", ()))
        # What functional_call puts in a parameter's place for a while is no leaf, or is gone when backward begins.
        named = [
            (name, parameter)
            for name, parameter in self.named_parameters()
            if not is_lazy(parameter)
            and parameter.is_leaf
            and (parameter.requires_grad or id(parameter) in self._forms)
        ]
        new = [(name, parameter) for name, parameter in named if self._forms.get(id(parameter)) != _form(parameter)]
        stand_ins = {
            id(parameter): _stand_in(self._forms[id(parameter)]) for _, parameter in new if id(parameter) in self._forms
        }
        return Change(named, new, stand_ins) if new else None

    # -- a comparison that costs next to nothing -----------------------------------------------------------------

    def _remember(self) -> None:
        parts = list(self.module.modules())
        self._dicts: list[dict[str, Any]] = [self._modules, *(part._modules for part in parts)]
        self._dicts += [part._parameters for part in parts]
        self._copies = [dict(children) for children in self._dicts]
        # Dicts compare values by identity first, then by ==, which of tensors is a tensor: True or False if it has one
        # element, an error otherwise. So these few are compared by themselves.
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
        except Exception:  # whatever == says of two different tensors
            return True
        return (
            any(held[key] is not value for held, key, value in self._single)
            or any(map(_trains, self._others))
            or list(map(_look, self._trained)) != self._looks
            or self._trained[0].device != self._device  # a module is moved as a whole
        )


def _form(parameter: Tensor) -> Form:
    return parameter.shape, parameter.dtype, parameter.device


def _stand_in(form: Form) -> nn.Parameter:
    shape, dtype, device = form
    return nn.Parameter(torch.zeros((), dtype=dtype, device=device).expand(shape), requires_grad=False)
