"""Checks whether ranks can train pieces of parameters, or whole ones, each with an optimizer of its own."""

from __future__ import annotations

import copy
import math
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, product
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.core.output.wording import with_article
from paceline.core.torch_internals.optimizer_hooks import drop_hooks, hooks_of
from paceline.core.torch_internals.tensors import tree_leaves
from paceline.errors import UsageError

_NAMES = ["SGD", "Adam", "AdamW", "Adagrad", "RMSprop", "Adadelta", "Adamax", "NAdam", "RAdam", "ASGD", "Rprop"]
_ELEMENTWISE = {getattr(torch.optim, name) for name in [*_NAMES, "SparseAdam"]}
_STEPS = 40
"""Steps of a trial: some optimizers begin to treat a tensor as a whole only after 10 or 25 steps."""
_ORTHOGONAL_EVERY = 6
_CUT = 100
"""Elements of the second tensor that the first rank has in a trial."""
_RATES = {"lr", "initial_lr"}
_NOT_SETTINGS = ("params", "param_names")
_OTHER_RESULTS = "gives other results"
_SHAPES = {
    1: ((240,), (160,)),
    2: ((6, 40), (10, 16)),
    3: ((6, 8, 5), (10, 4, 4)),
    4: ((6, 10, 2, 2), (10, 4, 2, 2)),
    5: ((6, 5, 2, 2, 2), (10, 2, 2, 2, 2)),
}
"""Shapes of the tensors of a trial, by their number of dimensions."""
Settings = Sequence[Mapping[str, Any]]
"""Those of each group, because some optimizers know their groups by number."""
Make = Callable[[Any], Optimizer]
"""Makes an optimizer over parameter groups."""


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
    """Return the attributes of `optimizer` that its class has added, which torch's copies leave out."""
    left_out = {*copied, *hooks_of(optimizer)}
    kept = {
        # Containers are copied, because a trial of the optimizer changes them.
        name: copy.deepcopy(value) if isinstance(value, Tensor | list | dict | set) else value
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
    """Refuse a class that is not an optimizer, or that cannot be sharded."""
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


def check_separable(make: Make, name: str, groups: Sequence[Mapping[str, Any]], by: str) -> None:
    """Refuse settings of `groups` with which ranks cannot update their pieces, or tensors, separately."""
    settings = [{key: value for key, value in group.items() if key not in _NOT_SETTINGS} for group in groups]
    devices = (each.device for group in groups for each in group["params"])
    device = next((each for each in devices if each.type != "meta"), torch.device("cpu"))
    # Some optimizers treat vectors, matrices or convolutions alone as a whole.
    dims = [sorted({min(max(each.dim(), 1), max(_SHAPES)) for each in group["params"]}) or [2] for group in groups]
    trials = [[own[number % len(own)] for own in dims] for number in range(max(map(len, dims)))]
    if not (difference := find_difference(make, settings, by, device, trials)):
        return
    remedy = "use the optimizer itself"
    if by == "element" and not find_difference(make, settings, "tensor", device, trials):
        remedy = 'give by="tensor", which gives every rank whole parameters'
    if difference is not _OTHER_RESULTS:
        problem = f"could not be tried on small tensors: it {difference}"
    elif by == "element":
        problem = "does not treat every element of a parameter by itself, as training pieces of parameters takes"
    else:
        problem = (
            "with these settings gives other results if ranks update their tensors separately, as with a norm of all "
            "gradients, a step size for all of them, or random numbers"
        )
    raise UsageError(f"{name} {problem}; {remedy}")


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
    return not find_difference(partial(optimizer_class, **options), [{}], "element", torch.device("cpu"))


def find_difference(
    make: Make, settings: Settings, by: str, device: torch.device, trials: Sequence[Sequence[int]] = ()
) -> str:
    """Train small tensors by one optimizer, and by one for each of two ranks; return what differs, or "".

    Each of the `trials` gives the number of dimensions of each group's tensors, by default 2.
    """
    differences = (_difference(make, settings, by, device, dims) for dims in trials or [[2] * len(settings)])
    return next(filter(None, differences), "")


def _difference(make: Make, settings: Settings, by: str, device: torch.device, dims: Sequence[int]) -> str:
    devices = [device] if device.type == "cuda" else []
    problem = ""
    # In double precision, in which even tiny updates can be compared; some kernels have single precision alone.
    for dtype, tolerance in ((torch.float64, 1e-5), (torch.float32, 1e-2)):
        with torch.random.fork_rng(devices), torch.enable_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                torch.manual_seed(0)
                like = torch.empty(0, dtype=dtype, device=device)
                start = [[torch.randn(shape, dtype=torch.float64).to(like) for shape in _SHAPES[dim]] for dim in dims]
                is_equal = _is_equal(make, settings, by, start, tolerance)
            except UsageError:
                raise
            except Exception as error:  # no pieces of one dimension, or more is needed than a gradient
                problem = f"raised {type(error).__name__}: {str(error).partition(chr(10))[0][:200]}"
                continue
        return "" if is_equal else _OTHER_RESULTS
    return problem


def _is_equal(make: Make, settings: Settings, by: str, start: list[list[Tensor]], tolerance: float) -> bool:
    """Return whether one optimizer for everything, and one for each of two ranks, do and keep the same."""
    whole = _train(make, settings, start)
    ranks = []
    for rank, owned in enumerate([[0, 1], [1]] if by == "element" else [[0], [1]]):
        gradients = [[_parts(pair, by)[rank] for pair in step] for step in whole.gradients]
        ranks.append(_train(make, settings, [_parts(pair, by)[rank] for pair in start], gradients))
        if ranks[-1].kept != [[pair[place] for place in owned] for pair in whole.kept]:
            return False
    one, other = (
        torch.cat([tensor.flatten() for group in zip(*updates, strict=True) for part in group for tensor in part])
        for updates in ([whole.updates], [run.updates for run in ranks])
    )
    if not one.any():
        raise ValueError("the step changed nothing")
    limit = tolerance * one.abs() + 1e-2 * tolerance * one.abs().max()
    return bool(((one - other).abs() <= limit).all()) and (by == "tensor" or whole.is_elementwise)


def _parts(pair: Sequence[Tensor], by: str) -> list[list[Tensor]]:
    """Return what each of two ranks has of a pair of tensors."""
    if by == "tensor":
        return [[tensor] for tensor in pair]
    first, second = (tensor.flatten() for tensor in pair)
    # In the middle of a row, so that an optimizer which goes by rows or columns shows a difference, too.
    return [[first, second[:_CUT]], [second[_CUT:]]]


def _gradient(step: int, parameter: Tensor) -> Tensor:
    """Return a gradient whose parts have other sizes in each step, so that common norms and step sizes show.

    Most point the same way, as for step sizes that grow with progress. Some are almost orthogonal to the rows of the
    parameter, for which AdamP changes its update.
    """
    value = parameter.detach()
    noise = torch.randn(value.shape, dtype=torch.float64).to(value)
    if step % _ORTHOGONAL_EVERY == _ORTHOGONAL_EVERY - 1:
        size = value.norm(dim=-1, keepdim=True)
        along = (noise * value).sum(-1, keepdim=True) / size - 0.003 * noise.norm(dim=-1, keepdim=True)
        orthogonal: Tensor = noise - value / size * along
        return orthogonal
    sizes = [10 ** (2 * math.sin(0.9 * step + len(value))), 10 ** (2 * math.cos(1.7 * step - len(value)))]
    steady = torch.linspace(0.5, 1.5, value.numel()).to(value).view_as(value)
    flat = (steady + 0.3 * noise).flatten()
    return torch.cat([flat[:_CUT] * sizes[0], flat[_CUT:] * sizes[1]]).view_as(value)


@dataclass
class _Run:
    """What an optimizer has done to its tensors, and what it keeps."""

    gradients: list[list[list[Tensor]]]
    """For each step and group, those of all tensors."""
    updates: list[list[Tensor]]
    """For each group, the changes of its tensors."""
    kept: list[list[list[str]]]
    """For each group and tensor, the numbers in its state and in all settings, such as a norm of all gradients."""
    is_elementwise: bool
    """Whether states have a value for each element, and numbers, but nothing else, such as a preconditioner."""


def _train(
    make: Make, settings: Settings, start: list[list[Tensor]], given: list[list[list[Tensor]]] | None = None
) -> _Run:
    """Train groups of tensors by an optimizer of their own, with the gradients `given`, or with new ones."""
    torch.manual_seed(0)
    groups = [[nn.Parameter(value.clone()) for value in values] for values in start]
    made = [{**copy.deepcopy(dict(its)), "params": group} for its, group in zip(settings, groups, strict=True)]
    optimizer: Any = make(made)
    for group, rate in product(optimizer.param_groups, _RATES):
        if rate in group:  # with a small one no difference would show
            group[rate] = torch.ones_like(group[rate]) if isinstance(group[rate], Tensor) else 1.0
    if callable(train := getattr(optimizer, "train", None)):  # a schedule-free one
        train()
    gradients = []
    for step in range(_STEPS):
        gradients.append(given[step] if given else [[_gradient(step, each) for each in group] for group in groups])
        for parameter, gradient in zip(chain(*groups), chain(*gradients[-1]), strict=True):
            parameter.grad = gradient.clone()
        optimizer.step()
    common = _numbers([{**group, "params": None, "param_names": None} for group in optimizer.param_groups])
    updates = [parameter.detach() - value for parameter, value in zip(chain(*groups), chain(*start), strict=True)]
    kept = [_numbers(optimizer.state.get(parameter)) + common for parameter in chain(*groups)]
    return _Run(
        gradients,
        [[updates.pop(0) for _ in group] for group in groups],
        [[kept.pop(0) for _ in group] for group in groups],
        all(
            _is_number(leaf) or (isinstance(leaf, Tensor) and leaf.shape == each.shape)
            for each in chain(*groups)
            for leaf in tree_leaves(optimizer.state.get(each))
        ),
    )


def _is_number(value: Any) -> bool:
    return value is None or isinstance(value, int | float | str) or (isinstance(value, Tensor) and value.numel() == 1)


def _numbers(values: Any) -> list[str]:
    """Return the numbers and words in `values`, rounded to be compared."""
    numbers = [each.item() if isinstance(each, Tensor) else each for each in tree_leaves(values) if _is_number(each)]
    return [f"{each:.5e}" if isinstance(each, float) else str(each) for each in numbers]
