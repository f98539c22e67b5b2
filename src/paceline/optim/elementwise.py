"""Checks whether an optimizer is elementwise, so that ranks can train pieces of parameters separately."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from paceline.core.output.wording import with_article
from paceline.core.torch_internals.optimizer_hooks import drop_hooks, hooks_of
from paceline.errors import UsageError

_NAMES = ["SGD", "Adam", "AdamW", "Adagrad", "RMSprop", "Adadelta", "Adamax", "NAdam", "RAdam", "ASGD", "Rprop"]
_ELEMENTWISE = {getattr(torch.optim, name) for name in [*_NAMES, "SparseAdam"]}
# More than one, because what an optimizer keeps in its state acts from the second step on.
_STEPS = 4


class Prototype:
    """An optimizer that was made already, and is called like a class; its class may take any arguments."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer

    def __call__(self, groups: Any) -> Optimizer:
        """Return another optimizer of this kind, over `groups`, without state and hooks."""
        made = copy.copy(self.optimizer)
        drop_hooks(made)
        made.state, made.param_groups = defaultdict(dict), []
        vars(made).update(_own_attributes(self.optimizer, vars(made)))
        for group in groups if isinstance(groups[0], dict) else [{"params": groups}]:
            made.add_param_group(group)
        return made


def _own_attributes(optimizer: Optimizer, copied: Mapping[str, Any]) -> dict[str, Any]:
    """Return the attributes of `optimizer` that its class has added, which torch's copies leave out.

    Raises:
        UsageError: if there are parameters among them, because a rank trains only pieces of parameters.
    """
    left_out = {*copied, *hooks_of(optimizer)}
    kept = {
        name: value
        for name, value in vars(optimizer).items()
        # A method that replaces the class's is bound to this optimizer, such as a step that a scheduler counts.
        if name not in left_out and not callable(getattr(type(optimizer), name, None))
    }
    for name, value in kept.items():
        held = value.values() if isinstance(value, Mapping) else value
        if isinstance(value, nn.Parameter) or any(
            isinstance(each, nn.Parameter) for each in (held if isinstance(held, Iterable) else ())
        ):
            raise UsageError(
                f"{type(optimizer).__name__} keeps parameters in its attribute {name!r}, and so cannot be shared out "
                "once it is made; give ShardedOptimizer the parameters, the class and its settings"
            )
    return kept


def check_class(optimizer_class: Any, options: Mapping[str, Any], by: str) -> None:
    """Refuse a class that is not an optimizer, or cannot be sharded `by` ``"element"`` or ``"tensor"``.

    Raises:
        UsageError: names the class, and the remedy.
    """
    if by not in ("element", "tensor"):
        raise UsageError(f'ShardedOptimizer(by=…) takes "element" or "tensor", not {by!r}')
    if not isinstance(optimizer_class, type) or not issubclass(optimizer_class, Optimizer):
        given = optimizer_class if isinstance(optimizer_class, type) else with_article(type(optimizer_class).__name__)
        raise UsageError(
            f"ShardedOptimizer takes the class of an optimizer, such as torch.optim.AdamW, not {given}; "
            "ShardedOptimizer.of(optimizer) takes an optimizer"
        )
    name = optimizer_class.__name__
    if issubclass(optimizer_class, torch.optim.LBFGS):
        raise UsageError(f"{name} needs a closure and all parameters at once, and cannot be sharded; use it as it is")
    if options.get("differentiable"):
        raise UsageError(f"{name}(differentiable=True) cannot be sharded; leave it out, or use the optimizer as it is")
    if by == "element" and not is_elementwise(optimizer_class, options):
        raise UsageError(
            f"{name} does not treat every element of a parameter by itself, so parameters cannot be cut into pieces "
            'for it; give by="tensor", which gives every rank whole parameters'
        )


def is_known_elementwise(optimizer_class: type[Optimizer]) -> bool:
    """Return whether the class is one of torch's elementwise optimizers."""
    # The class itself: a subclass may do anything with its parameters.
    return optimizer_class in _ELEMENTWISE


def sample_parameters(optimizer_class: type[Optimizer], by: str, shapes: Sequence[Sequence[int]]) -> list[nn.Parameter]:
    """Return parameters with which the class raises its errors on every rank, whatever pieces the rank owns.

    Where the class gets whole parameters they have the `shapes` of these, but no memory: it may check the number of
    dimensions, like Muon.
    """
    asked = shapes if by == "tensor" and not is_known_elementwise(optimizer_class) else ()
    return [nn.Parameter(torch.zeros(()).expand(shape)) for shape in asked or [(1,)]]


def is_elementwise(optimizer_class: type[Optimizer], options: Mapping[str, Any]) -> bool:
    """Return whether a parameter can be cut for the optimizer; an unknown class is tried on a small parameter."""
    if is_known_elementwise(optimizer_class):
        return True
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        torch.manual_seed(0)
        # In the middle of a row, so that an optimizer which goes by rows or columns shows a difference, too.
        shape, cut = (6, 40), 100
        start = torch.randn(shape, device="cpu")
        gradients = [torch.randn(shape, device="cpu") for _ in range(_STEPS)]
        try:
            whole = _trained(optimizer_class, options, [start], [[gradient] for gradient in gradients])
            flat = [[each.flatten()[:cut], each.flatten()[cut:]] for each in [start, *gradients]]
            parts = _trained(optimizer_class, options, flat[0], flat[1:])
        except Exception:  # the class does not take parameters of one dimension, or needs more than a gradient
            return False
    return torch.allclose(whole[0].flatten(), torch.cat(parts), rtol=1e-6, atol=0.0)


def _trained(
    optimizer_class: type[Optimizer],
    options: Mapping[str, Any],
    start: list[torch.Tensor],
    gradients: list[list[torch.Tensor]],
) -> list[torch.Tensor]:
    parameters = [nn.Parameter(value.clone()) for value in start]
    optimizer: Any = optimizer_class(parameters, **options)
    for group in optimizer.param_groups:
        if isinstance(group.get("lr"), float):
            group["lr"] = max(group["lr"], 0.01)  # with a small one no difference would show
    for values in gradients:
        for parameter, value in zip(parameters, values, strict=True):
            parameter.grad = value.clone()
        optimizer.step()
    return [parameter.detach() for parameter in parameters]
