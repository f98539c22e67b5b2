"""Parameters that the module gets after it was wrapped: noticed in backward, agreed on by all ranks, and taken in.

    backward begins ──► 1. look ──► 2. a new parameter has a gradient: flag in the control block
                                                │ on any rank
              5. taken into the buckets ◄── 4. average apart ◄── 3. compare on all ranks ──► refuse on all ranks

A new head, an adapter, a parameter that was frozen, ``load_state_dict(assign=True)``, ``model.to(dtype)``: no change of
a module calls the wrapper, so the wrapper looks at the module after each forward. All ranks are told in the control
block, so that a change on one rank alone is an error on all of them and leaves no rank waiting. The first gradients
are averaged outside the buckets; from the next backward on the new parameters are like any other.

Decision 0013 says why.
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
"""Function that takes all parameters to average, and whether they are averaged by now."""
Form = tuple[torch.Size, torch.dtype, torch.device]
_requires_grad, _look = attrgetter("requires_grad"), attrgetter("shape", "dtype")
DENSE, SPARSE, NON_FINITE = 1, 2, 4  # bits of the code of a rank's gradient; 0 for none


@dataclass
class Change:
    """How the parameters that the module has now differ from those that are averaged."""

    named: Named
    """All parameters to average from now on, in the module's order."""
    new: Named
    """Parameters that are not averaged yet, or whose shape, dtype or device has changed."""
    placeholders: dict[int, nn.Parameter] = field(default_factory=dict)
    """By ``id`` of a parameter that took another form, a parameter of the old form, which never has a gradient."""
    _locals: list[nn.Parameter] = field(init=False)
    _had_gradient: list[bool] = field(default_factory=list)
    _sums: dict[int, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._locals = [as_local(parameter) for _, parameter in self.new]

    def begin(self) -> None:
        """Note which of the new parameters have a gradient before a backward, and forget sums of an earlier one."""
        self._had_gradient = [parameter.grad is not None for parameter in self._locals]
        self._sums = {}

    def take(self, check: Callable[[str, Tensor], None]) -> dict[int, Tensor]:
        """Take the gradients of a slice from the new parameters, by their ``id``, in the dtype in which they are added.

        Each is passed to `check` before, with the parameter's name.
        """
        taken = {}
        for (name, new), parameter in zip(self.new, self._locals, strict=True):
            if (gradient := parameter.grad) is not None:
                check(name, gradient)
                taken[id(new)] = gradient.to(torch.promote_types(gradient.dtype, torch.float32))
                parameter.grad = None
        return taken

    def add(self, sums: Sequence[dict[int, Tensor]]) -> None:
        """Add the `sums` of earlier slices to the gradients, one after the other; they are :meth:`gradients` then."""
        for index, ((_, new), parameter) in enumerate(zip(self.new, self._locals, strict=True)):
            total = None if parameter.grad is None else parameter.grad.detach()
            for earlier in sums:
                if (gradient := earlier.pop(id(new), None)) is not None:
                    total = gradient.add_(0.0 if total is None else total)
                elif total is not None:
                    total = total + 0.0  # as on a rank that has no gradient, which makes 0.0 of -0.0
            if total is not None:
                self._sums[index] = total
                parameter.grad = total.to(new.dtype)  # which tells that there is one, and whether it is finite

    def restore(self) -> None:
        """Drop the gradients that this backward made, after an exception has ended it."""
        for parameter, had_gradient in zip(self._locals, self._had_gradient, strict=True):
            if not had_gradient:
                parameter.grad = None

    def has_gradient(self) -> bool:
        """Return whether one of the new parameters was used.

        Unused ones, such as an average of weights, are no change, so a rank may keep modules of its own inside the
        model, as with torch DDP.
        """
        return any(parameter.grad is not None for parameter in self._locals)

    def described(self) -> list[list[str]]:
        """Return every parameter's name and form, which must be equal on all ranks, the new ones first."""
        # The new ones first, because the first difference is the one that a message names.
        new = {id(parameter) for _, parameter in self.new}
        usual = [[name, describe_form(parameter)] for name, parameter in self.named if id(parameter) not in new]
        return [[name, f"{describe_form(parameter)}, new"] for name, parameter in self.new] + usual

    def codes(self, *, check_finite: bool) -> list[int]:
        """Return a code of bits for each new parameter's gradient: whether it is there, sparse, not finite."""
        codes = []
        for gradient in (parameter.grad for parameter in self._locals):
            code = 0 if gradient is None else SPARSE if gradient.is_sparse else DENSE
            if gradient is not None and check_finite and not torch.isfinite(stored_elements(gradient)).all():
                code |= NON_FINITE
            codes.append(code)
        return codes

    def gradients(self) -> dict[int, Tensor]:
        """Return this rank's gradients of the new parameters, by their index."""
        pairs = enumerate(parameter.grad for parameter in self._locals)
        return {index: self._sums.get(index, gradient) for index, gradient in pairs if gradient is not None}

    def targets(self, indices: Sequence[int]) -> dict[int, Tensor]:
        """Return zeros to which the gradients of `indices` are added."""
        return {index: torch.zeros_like(self._locals[index].detach()) for index in indices}

    def show(self, averages: Mapping[int, Tensor]) -> None:
        """Set the new parameters' gradients to the averages, and to None where there is none."""
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
        trained: the parameters that are averaged.
    """

    def __init__(
        self,
        modules: dict[str, Any],
        ignored: set[str],
        delayed: Sequence[tuple[str, nn.Parameter]],
        trained: Named,
    ) -> None:
        self._modules, self._ignored, self._delayed = modules, ignored, delayed
        self.change: Change | None = None
        """How the module differs from the parameters that are averaged, when it was last looked at."""
        self.changes = 0
        """Times that the module was found to be another than before."""
        self._looked_in = -1  # the graph task in which it looked last
        self.follow(trained)

    @property
    def module(self) -> nn.Module:
        module: nn.Module = self._modules["module"]
        return module

    def named_parameters(self) -> Named:
        """Return the parameters as they are now, without the ignored ones."""
        own = list(self.module.named_parameters())
        seen = {id(parameter) for _, parameter in own}
        named = own + [(name, parameter) for name, parameter in self._delayed if id(parameter) not in seen]
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
        """Return how the module has changed; None if there are no new parameters to average."""
        task = current_task()
        # Once in each graph task: a module does not change inside one, and hooks may ask for every output.
        if task == self._looked_in != -1:
            return self.change
        self._looked_in = task
        if self._differs():
            if self.change is not None:
                self.change.close()
            self.change = self._find()
            self._remember()
        return self.change

    def unchanged(self) -> Change:
        """Return a change for a rank that has none, which all ranks compare with those of the others."""
        named = [(name, parameter) for name, parameter in self.named_parameters() if id(parameter) in self._forms]
        return Change(named, [])

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
        placeholders = {
            key: _placeholder(self._forms[key]) for _, parameter in new if (key := id(parameter)) in self._forms
        }
        return Change(named, new, placeholders) if new else None

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


def _placeholder(form: Form) -> nn.Parameter:
    shape, dtype, device = form
    # Expanded, so that it takes no memory.
    return nn.Parameter(torch.zeros((), dtype=dtype, device=device).expand(shape), requires_grad=False)


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
