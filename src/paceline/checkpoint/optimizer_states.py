"""Descriptions of optimizers in checkpoints, compared with this run's optimizer before its state is loaded.

torch's ``load_state_dict`` compares only the number of parameters in each group. It replaces this run's settings with
the saved ones, and accepts Adam's state for SGD and one group's state for another. It also casts state, such as an fp32
copy of a bf16 parameter, to the parameter's dtype. A checkpoint therefore also contains:

    class      the name of the optimizer's class
    options    per group, the settings when it was registered or added, before training and schedules change them,
               without those that may have changed earlier
    names      per group, the parameters' names, prefixed with the name of the registered module, or null
    shapes, dtypes
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from paceline.checkpoint.module_states import part_of
from paceline.core.optimizer_shards import settings_of, uncast
from paceline.core.strict_json import shown
from paceline.core.torch_distributed import has_sharded
from paceline.core.unwrapping import plain_name, unwrap
from paceline.errors import CheckpointMismatch

Options = dict[int, dict[str, Any]]
"""Settings by the ``id`` of a group's first parameter, because scripts also remove groups."""


def stepping(object: Any) -> Optimizer | None:
    """Return the optimizer whose steps can be detected; for torch's PostLocalSGDOptimizer, the one inside it.

    Returns None for other optimizers that do not call ``Optimizer.__init__``, and for other objects.
    """
    if isinstance(object, Optimizer) and not hasattr(object, "defaults"):
        object = getattr(object, "optim", None)
    return object if isinstance(object, Optimizer) else None


def remembered_options(optimizer: Optimizer) -> Options:
    """Return a copy of the settings of each group of `optimizer`; groups that are added later join it."""
    options = _copied(optimizer.param_groups)
    # Weak, so that the optimizer is freed without waiting for the garbage collector.
    alive, add = weakref.ref(optimizer), vars(optimizer).get("add_param_group")

    def add_param_group(param_group: dict[str, Any]) -> None:
        current = alive()
        assert current is not None, "the optimizer is gone"
        (add or partial(type(current).add_param_group, current))(param_group)
        options.update(_copied(current.param_groups[-1:]))

    optimizer.add_param_group = add_param_group  # type: ignore[method-assign]
    return options


def was_trained(optimizer: Optimizer, others: Iterable[Any]) -> bool:
    """Return whether `optimizer` has stepped or loaded a state, as far as it or its schedule among `others` shows."""
    # Adagrad's constructor creates its states, with step 0. LRScheduler sets _opt_called when the optimizer steps.
    steps = [state.get("step", 1) for state in optimizer.state.values() if isinstance(state, Mapping) and state]
    schedules = [each for each in others if isinstance(each, LRScheduler) and each.optimizer is optimizer]
    steps += [getattr(optimizer, "_opt_called", 0), *(getattr(schedule, "last_epoch", 0) for schedule in schedules)]
    return any(bool(torch.as_tensor(step, device="cpu").any()) for step in steps)


def forget_changed(optimizer: Optimizer, options: Options) -> list[str]:
    """Remove the `options` that a schedule may have changed since `optimizer` was created; return their names."""
    removed: dict[str, Any] = {}
    for group in options.values():
        for key, default in optimizer.defaults.items():
            # A tensor may have been changed together with the default, which is the same object.
            may_differ = isinstance(default, torch.Tensor) or group.get(key) != default
            if key in group and may_differ and not (key == "lr" and "initial_lr" in group):
                removed[key] = group.pop(key)
    return list(removed)


def parameters(optimizer: Optimizer) -> list[torch.Tensor]:
    """Return the parameters of `optimizer`, in the order of the indices in its state."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def parameter_names(modules: Iterable[tuple[str, nn.Module]]) -> dict[int, str]:
    """Return the names of the parameters of `modules`, by ``id``."""
    return {
        id(parameter): f"{module_name}.{plain_name(name)}"
        for module_name, module in modules
        for name, parameter in unwrap(module).named_parameters()
    }


def describe(optimizer: Optimizer, options: Options, names: Mapping[int, str]) -> dict[str, Any]:
    """Describe `optimizer`, which had `options` when it was registered, as plain values."""
    groups = [group["params"] for group in optimizer.param_groups]
    # A group can be added without add_param_group().
    known = [options.get(_key(group), {}) for group in optimizer.param_groups]
    return {
        "class": _class_name(optimizer),
        "options": [{name: _plain(value) for name, value in group.items()} for group in known],
        "names": [[names.get(id(parameter)) for parameter in group] for group in groups],
        "shapes": [[list(parameter.shape) for parameter in group] for group in groups],
        "dtypes": [[parameter.dtype for parameter in group] for group in groups],
    }


def _class_name(optimizer: Optimizer) -> str:
    name: str = getattr(optimizer, "optimizer_class", type(optimizer)).__qualname__
    inner = stepping(optimizer)
    return name if inner is None or inner is optimizer else f"{name} of {_class_name(inner)}"


def check(name: str, live: Mapping[str, Any], saved: Mapping[str, Any], step: int, allow_changed: bool) -> None:
    """Compare the description of the optimizer `name` in this run with the description `saved` in `step`."""
    if not saved:
        raise CheckpointMismatch(
            f"{name!r} is an optimizer in this run, but not in the checkpoint of step {step}; register it under the "
            "name it was saved under"
        )
    sizes, saved_sizes = ([len(group) for group in about["shapes"]] for about in (live, saved))
    if saved_sizes != sizes:
        raise CheckpointMismatch(
            f"{name!r} has parameter groups of {saved_sizes} parameters in the checkpoint of step {step} but of "
            f"{sizes} in this run; create the groups that were saved"
        )
    if live["class"] != saved["class"]:
        raise CheckpointMismatch(
            f"{name!r} is of class {live['class']} in this run but of class {saved['class']!s:.80} in the checkpoint "
            f"of step {step}; create the optimizer that was saved, or start in another folder"
        )
    for aspect in ("names", "shapes"):
        for index, (group, saved_group) in enumerate(zip(live[aspect], saved[aspect], strict=True)):
            _check_group(name, index, aspect, group, saved_group, step)
    for change in [] if allow_changed else changes(name, live, saved):
        raise CheckpointMismatch(
            f"{change} in the checkpoint of step {step}; give the saved value, or keep this run's with "
            "allow_changed_settings=True (--allow-changed-settings)"
        )


def changes(name: str, live: Mapping[str, Any], saved: Mapping[str, Any]) -> list[str]:
    """Describe the settings that differ, such as ``momentum of group 0 of 'optimizer' is 0.5 in this run and 0.9``."""
    return [
        f"{key} of group {index} of {name!r} is {shown(_value(options, key))} in this run "
        f"and {shown(_value(saved_options, key))}"
        for index, (options, saved_options) in enumerate(zip(live["options"], saved["options"], strict=False))
        for key in _changed(options, saved_options)
    ]


def apply_options(optimizer: Optimizer, options: Options, live: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    """Set this run's value of each option that differs from `saved`, after `optimizer` has loaded its saved state.

    The learning rate is scaled instead, which preserves the schedule's factor.
    """
    for group, current, stored in zip(optimizer.param_groups, live["options"], saved["options"], strict=False):
        for key in _changed(current, stored):
            originals = options[_key(group)]
            if key != "lr":
                group[key] = copy.deepcopy(originals[key])
                continue
            # The loaded rate is the saved initial rate times the schedule's factor.
            rate, saved_rate = _value(current, "lr"), _value(stored, "lr")
            group["lr"] = group["lr"] * (rate / saved_rate) if saved_rate else copy.deepcopy(originals["lr"])
            if "initial_lr" in group:
                group["initial_lr"] = copy.deepcopy(_value(originals, "lr"))


def follow(scheduler: LRScheduler) -> None:
    """Make `scheduler` continue from the new rates of its optimizer, after both have loaded their states."""
    groups = scheduler.optimizer.param_groups
    # SequentialLR and ChainedScheduler contain schedulers instead of base rates. Groups may have been added since the
    # scheduler was created.
    for part in (scheduler, *getattr(scheduler, "_schedulers", ())):
        if hasattr(part, "base_lrs"):
            part.base_lrs = [group.get("initial_lr", base) for group, base in zip(groups, part.base_lrs, strict=False)]
    if isinstance(scheduler, LambdaLR):  # its function of the step may have changed as well
        for group, base, factor in zip(groups, scheduler.base_lrs, scheduler.lr_lambdas, strict=False):
            group["lr"] = base * factor(scheduler.last_epoch)
    scheduler._last_lr = [group["lr"] for group in groups]


def laid_out(optimizer: Optimizer, state: Any) -> Any:
    """Return the `state` of `optimizer`, distributed like its parameters."""
    own_parameters = parameters(optimizer)
    if not has_sharded(own_parameters) or not isinstance(state, dict):
        return state
    entries = {
        index: {name: part_of(value, own_parameters[index]) for name, value in entry.items()}
        if isinstance(index, int) and index < len(own_parameters) and isinstance(entry, Mapping)
        else entry
        for index, entry in state["state"].items()
    }
    return {**state, "state": entries}


def bring_back_dtypes(optimizer: Optimizer, state: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    """Undo the casts of ``load_state_dict(state)`` for parameters with the same dtype as in the checkpoint."""
    indices = (index for group in state["param_groups"] for index in group["params"])
    dtypes = (dtype for group in saved["dtypes"] for dtype in group)
    for index, parameter, dtype in zip(indices, parameters(optimizer), dtypes, strict=True):
        if parameter.dtype == dtype and parameter in optimizer.state and index in state["state"]:
            optimizer.state[parameter] = uncast(optimizer.state[parameter], state["state"][index])


def _check_group(name: str, index: int, aspect: str, group: list[Any], saved_group: list[Any], step: int) -> None:
    remedy = "give the groups and their parameters in the order in which they were saved"
    for place, (current, saved) in enumerate(zip(group, saved_group, strict=True)):
        if current is None or saved is None or current == saved:
            continue
        prefix = "of shape " if aspect == "shapes" else ""
        current, saved = (tuple(current), tuple(saved)) if aspect == "shapes" else (repr(current), shown(saved))
        raise CheckpointMismatch(
            f"parameter {place} of group {index} of {name!r} is {prefix}{current} in this run but {prefix}{saved} in "
            f"the checkpoint of step {step}; {remedy}"
        )


def _copied(groups: Iterable[Mapping[str, Any]]) -> Options:
    # Copied, because a learning rate can be a tensor that schedulers fill in place.
    return {_key(group): copy.deepcopy(settings_of(group)) for group in groups}


def _key(group: Mapping[str, Any]) -> int:
    return id(next(iter(group["params"]), None))


def _value(options: Mapping[str, Any], key: str) -> Any:
    """Return an option; for the learning rate, the initial one, which a schedule does not change."""
    return options.get("initial_lr", options[key]) if key == "lr" else options[key]


def _changed(current: Mapping[str, Any], saved: Mapping[str, Any]) -> list[str]:
    """Return the names of options that differ."""
    pairs = {key: (_value(current, key), _value(saved, key)) for key in current if key in saved and key != "initial_lr"}
    # NaN differs from itself, but is the same setting.
    return [key for key, (now, then) in pairs.items() if now != then and not (now != now and then != then)]


def _plain(value: Any) -> Any:
    """Return `value` in a form that can be compared: tensors as numbers, lists as tuples."""
    if isinstance(value, torch.Tensor):
        value = value.tolist()
    if isinstance(value, list | tuple):
        return tuple(map(_plain, value))
    return value
