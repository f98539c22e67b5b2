"""The arguments of a sharded optimizer: a model or parameters, and the ranks that share the work."""

from __future__ import annotations

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

from paceline.core.output.wording import with_article
from paceline.core.state.unwrapping import joins, plain_name, unwrap
from paceline.core.torch_internals.distributed.dtensor import is_sharded
from paceline.ddp.transport.sparse import sparse_by_layer
from paceline.ddp.wrapper.averaging import Averaging, find_wrappers
from paceline.errors import UsageError

_NAMED = 3
"""Number of parameters that a message names."""


@dataclass
class Subject:
    """The parameters that are trained, and the ranks that train them."""

    groups: list[Any]
    """Parameters or parameter groups, in the form that torch's optimizers take."""
    group: dist.ProcessGroup | None
    """The ranks that share the work; None in a world of one without a process group."""
    model: nn.Module | None = None
    """The model, if it was given in place of parameters."""
    names: Mapping[int, str] = field(default_factory=dict)
    """Names of the parameters of the model, or of wrappers, by ``id``."""
    sparse: frozenset[int] = frozenset()
    """Parameters whose gradients are sparse, by ``id``; every rank updates these."""
    wrappers: list[Averaging] = field(default_factory=list)
    """Wrappers of ours that average the gradients over several ranks."""

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
        """Return the shapes of the parameters, without those that have no shape yet."""
        return [each.shape for each in _parameters(self.groups) if isinstance(each, Tensor) and not is_lazy(each)]

    def replaced(self, parameters: Iterable[Tensor]) -> list[str]:
        """Return the names of those `parameters` that the model has replaced by others."""
        modules = [wrapper.module for wrapper in self.wrappers] if self.model is None else [self.model]
        present = {id(parameter) for module in modules for parameter in module.parameters()}
        gone = [id(parameter) for parameter in parameters if id(parameter) not in present]
        return [self.names[key] for key in gone if key in self.names]

    def is_joining(self) -> bool:
        """Return whether ranks may run out of data at different times."""
        if self.wrappers:
            return any(wrapper.is_in_join for wrapper in self.wrappers)
        return self.model is not None and joins(self.model)


def subject_of(params: nn.Module | Iterable[Any], process_group: dist.ProcessGroup | None) -> Subject:
    """Return the parameters in `params`, and the ranks that share the work."""
    model = params if isinstance(params, nn.Module) else None
    if isinstance(params, Tensor | set | frozenset) or not (model is not None or isinstance(params, Iterable)):
        raise UsageError(  # the order of a set is another on every rank
            "ShardedOptimizer takes a model, or a list of parameters or of groups, not "
            f"{with_article(type(params).__name__)}"
        )
    groups = [_listed(entry) for entry in (params.parameters() if isinstance(params, nn.Module) else params)]
    if not groups:
        raise UsageError("ShardedOptimizer got no parameters; give the model, or those that it is to train")
    ours = find_wrappers({id(parameter) for parameter in _parameters(groups)})
    group = process_group
    if group is None and dist.is_initialized():
        group = getattr(model, "process_group", None)  # torch's wrapper has one, too
        group = ours[0].group if group is None and ours else group or dist.group.WORLD
    for wrapper in ours if group is not None else ():
        ranks, theirs = (dist.get_process_group_ranks(each) for each in (group, wrapper.group))
        if ranks != theirs:
            raise UsageError(
                f"the ShardedOptimizer is of ranks {ranks}, but the wrapper averages over ranks {theirs}; give both "
                "the same process_group"
            )
    names = {key: name for wrapper in ours for key, name in wrapper.names.items()}
    if model is not None:  # its own names win, because the script knows these
        names |= {id(parameter): plain_name(name) for name, parameter in unwrap(model).named_parameters()}
    modules = [wrapper.module for wrapper in ours] if model is None else [model]
    sparse = frozenset(parameter for module in modules for parameter in sparse_by_layer(module))
    # A wrapper over one rank averages nothing, so nothing of it has to fit.
    several = [wrapper for wrapper in ours if group is not None and dist.get_world_size(wrapper.group) > 1]
    return Subject(groups, group, model, names, sparse, several)


def _listed(entry: Any) -> Any:
    """Return a group with a list of parameters in place of an iterator, which could be read only once."""
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


def validate_plain(group: Any, before: Sequence[Mapping[str, Any]], subject: Subject) -> None:
    """Refuse a group with parameters that cannot be sharded."""
    if not isinstance(group, dict) or "params" not in group:
        raise UsageError(f'a parameter group is a dict with "params", not {group!r:.80}')
    params = group["params"]
    if not isinstance(params, Tensor | set):  # which torch takes or refuses itself
        group["params"] = params = list(params)
    seen = {id(parameter) for other in before for parameter in other["params"]}
    device = next((parameter.device for other in before for parameter in other["params"]), None)
    averaged = {key for wrapper in subject.wrappers for key in wrapper.names} if subject.wrappers else None
    for parameter in _parameters([group]):
        if not isinstance(parameter, Tensor):
            raise UsageError(f"ShardedOptimizer trains tensors, not {type(parameter).__name__}")
        name = subject.name_of(parameter)
        if id(parameter) in seen:
            raise UsageError(f"{name} is in two parameter groups, or twice in one; give it once")
        seen.add(id(parameter))
        if is_sharded(parameter):
            raise UsageError(f"{name} is a DTensor, which is sharded already; use the optimizer itself")
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            raise UsageError(f"{name} has no shape yet; run a forward before the optimizer is made")
        if parameter.device.type != (device := device or parameter.device).type:
            raise UsageError(
                f"{name} is on {parameter.device}, but another on {device}; make one optimizer for each device"
            )
        if averaged is not None and parameter.requires_grad and id(parameter) not in averaged:
            raise UsageError(
                f"{name} is none that the wrapper averages, unlike the others; give the wrapper's parameters alone, "
                "and make another optimizer for the rest"
            )


def validate_step(
    closure: Any, subject: Subject, groups: Sequence[Mapping[str, Any]], trained: Sequence[Sequence[Tensor]]
) -> None:
    """Refuse a step that cannot be taken over `groups`; `trained` are the parameters of each when it was added."""
    if closure is not None:
        raise UsageError("ShardedOptimizer.step() takes no closure; call it before the step, and leave it out here")
    if subject.is_joining():
        raise UsageError(
            "a ShardedOptimizer cannot step inside model.join(), as a rank that has run out of data would not "
            "update its share; leave join() out, or use the optimizer itself"
        )
    for number, (group, given) in enumerate(zip_longest(groups, trained)):
        now = () if group is None else group["params"]
        if given is None or len(now) != len(given) or not all(map(is_, now, given)):
            raise UsageError(
                f"parameter group {number} of the ShardedOptimizer has {len(now)} parameters, which are others than "
                f"the {len(given or ())} that were given; add some by add_param_group(), leave some out by setting "
                "requires_grad to False and p.grad to None, or make another optimizer"
            )
    everything = [parameter for given in trained for parameter in given]
    if all(parameter.grad is None for parameter in everything):
        if replaced := subject.replaced(everything):
            more = f" and {len(replaced) - _NAMED} more" if len(replaced) > _NAMED else ""
            raise UsageError(
                f"the ShardedOptimizer trains {', '.join(map(repr, replaced[:_NAMED]))}{more}, but the model has got "
                "other parameters in their place since, as from load_state_dict(assign=True); make another "
                "ShardedOptimizer, and load the state of this one"
            )
        raise UsageError(
            "ShardedOptimizer.step() was called without a gradient in any parameter; call loss.backward() first"
        )


def describe_groups(
    optimizer_class: type[Optimizer],
    by: str,
    master_dtype: torch.dtype | None,
    groups: Sequence[Mapping[str, Any]],
) -> list[Any]:
    """Describe optimizer, settings and parameters as plain values that have to be equal on every rank."""
    return [
        (optimizer_class.__qualname__, by, str(master_dtype)),
        *(
            (
                sorted((name, _plain(value)) for name, value in group.items() if name != "params"),
                [(tuple(each.shape), str(each.dtype), each.requires_grad) for each in group["params"]],
            )
            for group in groups
        ),
    ]


def _plain(value: Any) -> str:
    plain = repr(value.tolist() if isinstance(value, Tensor) else value)
    # Without the addresses of functions and other objects, which differ between ranks.
    return re.sub(r" at 0x[0-9a-f]+", "", plain)
