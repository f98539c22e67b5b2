"""Checks whether an optimizer gives the same results if each rank updates only its share of the parameters.

Torch's elementwise optimizers are known to pass this check. Any other class is tried on small tensors, which it trains
first together and then one half at a time.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, product
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.core.output.wording import with_article
from paceline.core.state.optimizer_shards import settings_of
from paceline.core.torch_internals.tensors import tree_leaves
from paceline.errors import UsageError

_NAMES = ["SGD", "Adam", "AdamW", "Adagrad", "RMSprop", "Adadelta", "Adamax", "NAdam", "RAdam", "ASGD", "Rprop"]
_ELEMENTWISE = {getattr(torch.optim, name) for name in [*_NAMES, "SparseAdam"]}
_STEPS = 40
"""Number of steps in a trial. Some optimizers change their behavior only after 10 or 25 steps."""
_RATES = ("lr", "initial_lr")
_SHAPES = {
    1: ((240,), (160,)),
    2: ((6, 40), (10, 16)),
    3: ((6, 8, 5), (10, 4, 4)),
    4: ((6, 10, 2, 2), (10, 4, 2, 2)),
    5: ((6, 5, 2, 2, 2), (10, 2, 2, 2, 2)),
}
"""For each number of dimensions: shapes of the two tensors that represent all such parameters in a trial."""
Make = Callable[[Any], Optimizer]
"""A function that makes an optimizer for a list of parameter groups."""


def is_elementwise(optimizer_class: type[Optimizer]) -> bool:
    """Return whether this is an optimizer of torch that treats every element separately."""
    # Subclasses are excluded, because they can do anything with their parameters.
    return optimizer_class in _ELEMENTWISE


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
    if issubclass(optimizer_class, torch.optim.LBFGS):
        raise UsageError(f"{name} needs a closure and all parameters at once; use it without ShardedOptimizer")
    if all(callable(getattr(optimizer_class, view, None)) for view in ("train", "eval")):
        raise UsageError(
            f"{name} has train() and eval(), which switch between two sets of weights; use it without ShardedOptimizer"
        )
    if options.get("differentiable"):
        raise UsageError(f"{name}(differentiable=True) cannot be sharded; remove this option")
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
    return [nn.Parameter(torch.zeros(()).expand(shape)) for shape in needed or [(1,)]]


def check_separable(make: Make, name: str, groups: Sequence[Mapping[str, Any]]) -> None:
    """Refuse `groups` if ranks cannot update their tensors separately with these settings."""
    settings = [settings_of(group) for group in groups]
    devices = (parameter.device for group in groups for parameter in group["params"])
    device = next((device for device in devices if device.type != "meta"), torch.device("cpu"))
    # Some optimizers treat vectors, matrices and convolutions differently.
    dims = [{min(max(parameter.dim(), 1), max(_SHAPES)) for parameter in group["params"]} or {2} for group in groups]
    problem = ""
    # Double precision makes even tiny updates comparable, but some kernels support only single precision.
    for dtype, tolerance in ((torch.float64, 1e-5), (torch.float32, 1e-2)):
        with (
            torch.random.fork_rng([device] if device.type == "cuda" else []),
            torch.enable_grad(),
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore")
            torch.manual_seed(0)
            like = torch.empty(0, dtype=dtype, device=device)
            # For each group, the first half of the tensors and the second half.
            start = [
                [
                    [torch.randn(_SHAPES[dim][half], dtype=torch.float64).to(like) for dim in sorted(group)]
                    for group in dims
                ]
                for half in (0, 1)
            ]
            try:
                is_equal = _is_separable(make, settings, start, tolerance)
            except Exception as error:  # the class is the user's, and may need more than gradients
                problem = f"raised {type(error).__name__}: {str(error).partition(chr(10))[0][:200]}"
                continue
        if is_equal:
            return
        raise UsageError(
            f"{name} with these settings gives different results if ranks update their tensors separately, for example "
            "because it uses a norm of all gradients, one step size for all of them, or random numbers; "
            "use it without ShardedOptimizer"
        )
    raise UsageError(f"{name} could not be tried on small tensors: it {problem}; use it without ShardedOptimizer")


Tensors = list[list[Tensor]]
"""Tensors of each parameter group."""


@dataclass
class _Run:
    """The effect of an optimizer on its tensors, and the numbers in its state."""

    updates: Tensors
    kept: list[list[list[str]]]
    """For each group and tensor, the numbers in its state and in all groups' settings, such as a global norm."""


def _is_separable(
    make: Make, settings: Sequence[Mapping[str, Any]], start: Sequence[Tensors], tolerance: float
) -> bool:
    """Return whether one optimizer for both halves computes and stores the same numbers as an optimizer per half."""
    gradients = [
        [[[_gradient(step, half, value) for value in group] for group in tensors] for half, tensors in enumerate(start)]
        for step in range(_STEPS)
    ]
    joint = _train(make, settings, _joined(start), [_joined(halves) for halves in gradients])
    runs = [
        _train(make, settings, tensors, [halves[half] for halves in gradients]) for half, tensors in enumerate(start)
    ]
    if _joined([run.kept for run in runs]) != joint.kept:
        return False
    together = _flattened(joint.updates)
    separate = _flattened(_joined([run.updates for run in runs]))
    if not together.any():
        raise ValueError("the step changed nothing")
    limit = tolerance * together.abs() + 1e-2 * tolerance * together.abs().max()
    return bool(((together - separate).abs() <= limit).all())


def _joined(halves: Sequence[list[list[Any]]]) -> list[list[Any]]:
    """Return the groups with the entries of all `halves`."""
    return [list(chain(*parts)) for parts in zip(*halves, strict=True)]


def _flattened(tensors: Tensors) -> Tensor:
    return torch.cat([tensor.flatten() for tensor in chain(*tensors)])


def _gradient(step: int, half: int, value: Tensor) -> Tensor:
    """Return a gradient whose size varies differently in each half, to reveal shared norms and step sizes.

    Its direction is mostly constant, because some step sizes grow with progress.
    """
    noise = torch.randn(value.shape, dtype=torch.float64).to(value)
    steady = torch.linspace(0.5, 1.5, value.numel()).to(value).view_as(value)
    wave = math.cos(1.7 * step - len(value)) if half else math.sin(0.9 * step + len(value))
    return (steady + 0.3 * noise) * 10 ** (2 * wave)


def _train(make: Make, settings: Sequence[Mapping[str, Any]], start: Tensors, gradients: Sequence[Tensors]) -> _Run:
    """Train copies of the tensors in `start` with a new optimizer, using the given gradients of each step."""
    torch.manual_seed(0)
    groups = [[nn.Parameter(value.clone()) for value in values] for values in start]
    optimizer = make(
        [
            {**copy.deepcopy(group_settings), "params": group}
            for group_settings, group in zip(settings, groups, strict=True)
        ]
    )
    for group, rate in product(optimizer.param_groups, _RATES):
        if rate in group:  # a small rate would hide differences
            group[rate] = torch.ones_like(group[rate]) if isinstance(group[rate], Tensor) else 1.0
    for step_gradients in gradients:
        for parameter, gradient in zip(chain(*groups), chain(*step_gradients), strict=True):
            parameter.grad = gradient.clone()
        optimizer.step()
    common = _numbers([settings_of(group) for group in optimizer.param_groups])
    return _Run(
        [
            [parameter.detach() - value for parameter, value in zip(group, values, strict=True)]
            for group, values in zip(groups, start, strict=True)
        ],
        [[_numbers(optimizer.state.get(parameter)) + common for parameter in group] for group in groups],
    )


def _numbers(values: Any) -> list[str]:
    """Return the numbers and strings in `values`, rounded so that they can be compared."""
    numbers = []
    for leaf in tree_leaves(values):
        if isinstance(leaf, Tensor) and leaf.numel() == 1:
            leaf = leaf.item()
        if leaf is None or isinstance(leaf, int | float | str):
            numbers.append(f"{leaf:.5e}" if isinstance(leaf, float) else str(leaf))
    return numbers
