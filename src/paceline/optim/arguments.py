"""The arguments of a sharded optimizer: its class, a model or parameters, and the ranks that share the work."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from operator import is_
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from paceline.core.messages import with_article
from paceline.core.torch_distributed import is_sharded
from paceline.core.unwrapping import joins, plain_name, unwrap
from paceline.ddp.sparse import sparse_by_layer
from paceline.ddp.wrapper import Averaging, find_wrappers
from paceline.errors import UsageError

_NAMES = ["SGD", "Adam", "AdamW", "Adagrad", "RMSprop", "Adadelta", "Adamax", "NAdam", "RAdam", "ASGD", "Rprop"]
_ELEMENTWISE = {getattr(torch.optim, name) for name in [*_NAMES, "SparseAdam"]}
_TENSORWISE = {*_ELEMENTWISE, torch.optim.Adafactor, torch.optim.Muon}
_DECLARATION = ". If every parameter's update depends on that parameter alone, set {}.updates_tensors_separately = True"


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


def template_parameters(optimizer_class: type[Optimizer], shapes: Sequence[Sequence[int]]) -> list[nn.Parameter]:
    """Return placeholder parameters that make the class raise the same errors on every rank.

    They use almost no memory, but have the real `shapes`, because classes such as Muon check the number of dimensions.
    """
    needed = [(1,)] if is_elementwise(optimizer_class) else shapes
    return [nn.Parameter(torch.zeros((), device="cpu").expand(shape)) for shape in needed or [(1,)]]


@dataclass
class Subject:
    """The parameters to train, and the ranks that train them."""

    groups: list[Any]
    """Parameters or parameter groups, in the form that torch's optimizers take."""
    group: dist.ProcessGroup | None
    """The ranks that share the work; None without a process group."""
    model: nn.Module | None = None
    """The model, if it was given instead of parameters."""
    names: Mapping[int, str] = field(default_factory=dict)
    """Parameter names in the model, or in the wrappers, by ``id``."""
    sparse: frozenset[int] = frozenset()
    """``id`` of each parameter with sparse gradients. Every rank updates these."""
    wrappers: list[Averaging] = field(default_factory=list)
    """Paceline's wrappers that average the gradients over several ranks."""

    @property
    def size(self) -> int:
        return 1 if self.group is None else dist.get_world_size(self.group)

    @property
    def rank(self) -> int:
        return 0 if self.group is None else dist.get_rank(self.group)

    @property
    def device(self) -> torch.device:
        """The device of the first parameter."""
        first = next(iter(_parameters(self.groups)), None)
        return first.device if isinstance(first, Tensor) else torch.device("cpu")

    def name_of(self, parameter: Tensor) -> str:
        """Return a parameter's name for messages."""
        name = self.names.get(id(parameter))
        return f"a parameter of shape {tuple(parameter.shape)}" if name is None else f"parameter {name!r}"

    def shapes(self) -> list[torch.Size]:
        """Return the shapes of the parameters, except for lazy ones, which have no shape yet."""
        parameters = _parameters(self.groups)
        return [parameter.shape for parameter in parameters if isinstance(parameter, Tensor) and not is_lazy(parameter)]

    def is_joining(self) -> bool:
        """Return whether ranks can run out of data at different times."""
        if self.wrappers:
            return any(wrapper.is_in_join for wrapper in self.wrappers)
        return self.model is not None and joins(self.model)


def subject_of(params: nn.Module | Iterable[Any], process_group: dist.ProcessGroup | None) -> Subject:
    """Return the subject with the parameters in `params` and the ranks that share the work."""
    model = params if isinstance(params, nn.Module) else None
    # A set is refused because its order differs between ranks.
    if isinstance(params, Tensor | set | frozenset) or not (model is not None or isinstance(params, Iterable)):
        raise UsageError(
            "ShardedOptimizer takes a model, or a list of parameters or groups, not "
            f"{with_article(type(params).__name__)}"
        )
    groups = [_listed(entry) for entry in (params.parameters() if isinstance(params, nn.Module) else params)]
    if not groups:
        raise UsageError("ShardedOptimizer got no parameters; give it the model, or the parameters to train")
    wrappers = find_wrappers({id(parameter) for parameter in _parameters(groups)})
    group = process_group
    if group is None and dist.is_initialized():
        group = getattr(model, "process_group", None)  # an attribute of torch's wrapper and of Paceline's
        group = wrappers[0].group if group is None and wrappers else group or dist.group.WORLD
    for wrapper in wrappers if group is not None else ():
        ranks, averaged_ranks = (dist.get_process_group_ranks(pg) for pg in (group, wrapper.group))
        if ranks != averaged_ranks:
            raise UsageError(
                f"the ShardedOptimizer has ranks {ranks}, but the wrapper averages over ranks {averaged_ranks}; "
                "give both the same process_group"
            )
    names = {key: name for wrapper in wrappers for key, name in wrapper.names.items()}
    if model is not None:  # the script uses these names
        names |= {id(parameter): plain_name(name) for name, parameter in unwrap(model).named_parameters()}
    modules = [wrapper.module for wrapper in wrappers] if model is None else [model]
    sparse = frozenset(parameter for module in modules for parameter in sparse_by_layer(module))
    # The parameters of a wrapper with a single rank need no check.
    averaging = [wrapper for wrapper in wrappers if group is not None and dist.get_world_size(wrapper.group) > 1]
    return Subject(groups, group, model, names, sparse, averaging)


def _listed(entry: Any) -> Any:
    """Turn the parameters of a group into a list if they are an iterator, which can be read only once."""
    if isinstance(entry, dict) and isinstance(entry.get("params"), Iterator):
        entry["params"] = list(entry["params"])
    return entry


def _parameters(groups: Iterable[Any]) -> Iterable[Any]:
    for entry in groups:
        if isinstance(entry, Mapping):
            params = entry.get("params", ())
            yield from _parameters([params] if isinstance(params, Tensor) else params)
        elif isinstance(entry, tuple):
            yield entry[-1]
        else:
            yield entry


def validate_group(group: Any, earlier: Sequence[Mapping[str, Any]], subject: Subject) -> None:
    """Refuse a new group with parameters that cannot be sharded; `earlier` lists the existing groups."""
    if not isinstance(group, dict) or "params" not in group:
        raise UsageError(f'a parameter group is a dict with "params", not {group!r:.80}')
    params = group["params"]
    if not isinstance(params, Tensor | set):  # torch handles these types
        group["params"] = params = list(params)
    earlier_ids = {id(parameter) for earlier_group in earlier for parameter in earlier_group["params"]}
    device = next((parameter.device for earlier_group in earlier for parameter in earlier_group["params"]), None)
    averaged = {key for wrapper in subject.wrappers for key in wrapper.names} if subject.wrappers else None
    for parameter in _parameters([group]):
        if not isinstance(parameter, Tensor):
            raise UsageError(f"ShardedOptimizer trains tensors, not {type(parameter).__name__}")
        name = subject.name_of(parameter)
        if id(parameter) in earlier_ids:
            raise UsageError(f"{name} is in two parameter groups, or twice in one; give it once")
        earlier_ids.add(id(parameter))
        if is_sharded(parameter):
            raise UsageError(
                f"{name} is a DTensor, which is already sharded; use the optimizer without ShardedOptimizer"
            )
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            raise UsageError(f"{name} has no shape yet; run a forward before you create the optimizer")
        if parameter.device.type != (device := device or parameter.device).type:
            raise UsageError(
                f"{name} is on {parameter.device}, but other parameters are on {device}; create one optimizer for "
                "each device"
            )
        if averaged is not None and parameter.requires_grad and id(parameter) not in averaged:
            raise UsageError(
                f"{name} is not averaged by the wrapper, unlike the others; give only the wrapper's parameters, "
                "and create another optimizer for the rest"
            )


def validate_step(
    closure: Any, subject: Subject, groups: Sequence[Mapping[str, Any]], added: Sequence[Sequence[Tensor]]
) -> None:
    """Refuse an invalid step; `added` lists the parameters that each group had when it was added."""
    if closure is not None:
        raise UsageError("ShardedOptimizer.step() takes no closure; call the closure before step()")
    if subject.is_joining():
        raise UsageError(
            "a ShardedOptimizer cannot step inside model.join(), because a rank that has run out of data would not "
            "update its share; remove join(), or use the optimizer without ShardedOptimizer"
        )
    for number, (group, parameters) in enumerate(zip_longest(groups, added)):
        current, expected = () if group is None else group["params"], parameters or ()
        if (
            (group is None) != (parameters is None)
            or len(current) != len(expected)
            or not all(map(is_, current, expected))
        ):
            raise UsageError(
                f"parameter group {number} of the ShardedOptimizer was edited: it has {len(current)} parameters but "
                f"was added with {len(expected)}; use add_param_group() to add parameters, and requires_grad=False and "
                "p.grad=None to leave some out"
            )
    if all(parameter.grad is None for parameters in added for parameter in parameters):
        raise UsageError(
            "ShardedOptimizer.step() was called but none of its parameters has a gradient; call loss.backward() first, "
            "and create a new ShardedOptimizer after load_state_dict(assign=True), which replaces the parameters"
        )


def describe_groups(
    optimizer_class: type[Optimizer], by: str, master_dtype: torch.dtype | None, groups: Sequence[Mapping[str, Any]]
) -> list[Any]:
    """Describe the optimizer, settings and parameters as plain values, which must be equal on every rank."""
    return [
        (optimizer_class.__qualname__, by, str(master_dtype)),
        *(
            (
                sorted((name, _plain(value)) for name, value in group.items() if name != "params"),
                [(tuple(param.shape), str(param.dtype), param.requires_grad) for param in group["params"]],
            )
            for group in groups
        ),
    ]


def _plain(value: Any) -> str:
    plain = repr(value.tolist() if isinstance(value, Tensor) else value)
    # Without the addresses of functions and other objects, which differ between ranks.
    return re.sub(r" at 0x[0-9a-f]+", "", plain)
