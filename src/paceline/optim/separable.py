"""Which optimizers give the same results if each rank updates only its share of the parameters."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from paceline.core.output.wording import with_article
from paceline.errors import UsageError

_NAMES = ["SGD", "Adam", "AdamW", "Adagrad", "RMSprop", "Adadelta", "Adamax", "NAdam", "RAdam", "ASGD", "Rprop"]
_ELEMENTWISE = {getattr(torch.optim, name) for name in [*_NAMES, "SparseAdam"]}
_TENSORWISE = {*_ELEMENTWISE, torch.optim.Adafactor, torch.optim.Muon}
_DECLARATION = ". If every parameter's update depends on that parameter alone, set {}.updates_tensors_separately = True"


def is_elementwise(optimizer_class: type[Optimizer]) -> bool:
    """Return whether this is an optimizer of torch that treats every element separately."""
    # Subclasses are excluded, because they can do anything with their parameters.
    return optimizer_class in _ELEMENTWISE


def _is_tensorwise(optimizer_class: type[Optimizer]) -> bool:
    """Return whether the class treats every tensor separately.

    This holds for a class with ``updates_tensors_separately = True``, for torch's optimizers except LBFGS, and for
    subclasses of these that override none of their attributes except special methods, such as ``__init__``.
    """
    if vars(optimizer_class).get("updates_tensors_separately") is True:  # subclasses may change the update
        return True
    for base in optimizer_class.__mro__:
        if base in _TENSORWISE:
            names = [name for name in dir(base) if not name.startswith("__")]
            # Unwrapped, because torch wraps the step() of a class when its first instance is created.
            return all(
                inspect.unwrap(getattr(optimizer_class, name)) is inspect.unwrap(getattr(base, name)) for name in names
            )
    return False


def check_class(optimizer_class: Any, options: Mapping[str, Any], by: str) -> None:
    """Refuse a class that is not an optimizer, or that cannot be sharded in this way."""
    if by not in ("element", "tensor"):
        raise UsageError(f'ShardedOptimizer(by=…) takes "element" or "tensor", not {by!r}')
    if not isinstance(optimizer_class, type) or not issubclass(optimizer_class, Optimizer):
        label = optimizer_class if isinstance(optimizer_class, type) else with_article(type(optimizer_class).__name__)
        raise UsageError(
            f"ShardedOptimizer takes the class of an optimizer, such as torch.optim.AdamW, not {label}; "
            "for an existing optimizer of torch, give optimizer.param_groups and type(optimizer)"
        )
    name = optimizer_class.__name__
    if all(callable(getattr(optimizer_class, view, None)) for view in ("train", "eval")):
        raise UsageError(
            f"{name} has train() and eval(), which switch between two sets of weights; use it without ShardedOptimizer"
        )
    if options.get("differentiable"):
        raise UsageError(f"{name}(differentiable=True) cannot be sharded; remove this option")
    if not _is_tensorwise(optimizer_class):
        raise UsageError(
            f"{name} may combine tensors in an update; use it without ShardedOptimizer"
            + ("" if issubclass(optimizer_class, torch.optim.LBFGS) else _DECLARATION.format(name))
        )
    if by == "element" and not is_elementwise(optimizer_class):
        raise UsageError(
            f"{name} is not an elementwise optimizer of torch, so it cannot train pieces of parameters; "
            'give by="tensor", which assigns whole parameters to ranks'
        )


def template_parameters(optimizer_class: type[Optimizer], shapes: Sequence[Sequence[int]]) -> list[nn.Parameter]:
    """Return placeholder parameters that make the class raise the same errors on every rank.

    They use almost no memory, but have the real `shapes`, because classes such as Muon check the number of dimensions.
    """
    needed = [(1,)] if is_elementwise(optimizer_class) else shapes
    return [nn.Parameter(torch.zeros((), device="cpu").expand(shape)) for shape in needed or [(1,)]]
