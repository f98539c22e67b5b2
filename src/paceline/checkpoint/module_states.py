"""States of modules: compares them with saved states, and converts saved states to the module's form.

Plain, compiled and tensor-parallel models share one checkpoint format, so each of them can load the others'
checkpoints: keys are saved without the ``torch.compile`` prefix, and DTensors are saved whole and distributed again on
load.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from paceline.core.torch_distributed import is_sharded, part_like
from paceline.core.unwrapping import plain_name
from paceline.errors import CheckpointMismatch


def without_compile(state: Any) -> Any:
    """Return `state` without the prefixes that ``torch.compile`` adds to keys."""
    if not isinstance(state, dict) or not any("_orig_mod" in str(key) for key in state):
        return state
    return OrderedDict((_plain_path(key), value) for key, value in state.items())


def as_in(own_keys: Iterable[str], state: Any) -> Any:
    """Return `state` with its keys renamed to match `own_keys`, which may have other compiled modules."""
    names = {_plain_path(key): key for key in own_keys}
    return OrderedDict((names.get(key, key), value) for key, value in without_compile(state).items())


def _plain_path(name: str) -> str:
    """Return the name of a parameter or module without the prefixes of ``torch.compile``."""
    return plain_name(f"{name}.").removesuffix(".")


def check_module(name: str, module: nn.Module, saved: Any, step: int) -> None:
    """Compare the state of `module` with the state `saved` in `step`; a difference raises a CheckpointMismatch.

    Submodules with their own loading code may accept other keys and shapes, so they are not compared.
    """
    remedy = "build the model that was saved, or choose another checkpoint"
    if not isinstance(saved, dict):
        raise CheckpointMismatch(
            f"{name!r} is a module in this run, but not in the checkpoint of step {step}; {remedy}"
        )
    own_state = without_compile(module.state_dict())
    parts = module.named_modules(remove_duplicate=False)
    flexible = tuple(f"{_plain_path(path)}." if path else "" for path, part in parts if _has_own_loading(part))
    parameters = {_plain_path(key) for key, _ in module.named_parameters(remove_duplicate=False)}
    for key, value in own_state.items():
        kind = "parameter" if key in parameters else "buffer"
        if key not in saved:
            if key.startswith(flexible):
                continue
            raise CheckpointMismatch(f"{kind} {key!r} of {name!r} is not in the checkpoint of step {step}; {remedy}")
        stored = saved[key]
        # Only the module's own set_extra_state() understands extra state.
        if key.endswith("_extra_state") or not (isinstance(value, torch.Tensor) or isinstance(stored, torch.Tensor)):
            continue
        if not isinstance(value, torch.Tensor) or not isinstance(stored, torch.Tensor):
            raise CheckpointMismatch(
                f"{key!r} of {name!r} is a {type(stored).__name__} in the checkpoint of step {step} but a "
                f"{type(value).__name__} in this run; {remedy}"
            )
        if torch.nn.parameter.is_lazy(value) or (value.shape != stored.shape and key.startswith(flexible)):
            continue
        if value.shape != stored.shape:
            raise CheckpointMismatch(
                f"{kind} {key!r} of {name!r} has shape {tuple(stored.shape)} in the checkpoint of step "
                f"{step} but {tuple(value.shape)} in this run; {remedy}"
            )
        if value.dtype != stored.dtype:
            raise CheckpointMismatch(
                f"{kind} {key!r} of {name!r} has dtype {stored.dtype} in the checkpoint of step {step} "
                f"but {value.dtype} in this run; {remedy}"
            )
    for key in saved:
        if key not in own_state and not key.startswith(flexible):
            raise CheckpointMismatch(
                f"{key!r} of {name!r} is in the checkpoint of step {step} but not in this run, or is None; {remedy}"
            )


def _has_own_loading(part: nn.Module) -> bool:
    """Return whether the class of `part`, or a hook, has its own code for loading a state."""
    # torch's own layers accept states of earlier versions, but no other shapes.
    loads = (type(part)._load_from_state_dict, type(part).load_state_dict)
    is_plain = all(load.__module__.startswith("torch.nn.modules.") for load in loads)
    return not is_plain or bool(part._load_state_dict_pre_hooks)


def laid_out(own_state: Any, state: Any) -> Any:
    """Return a module's `state`, distributed like the DTensors of its `own_state`."""
    return OrderedDict((key, part_of(value, own_state.get(key))) for key, value in state.items())


def part_of(value: Any, like: Any) -> Any:
    """Return `value` with the layout of `like`, if that is a DTensor of the same shape."""
    if not isinstance(value, torch.Tensor) or not isinstance(like, torch.Tensor) or not is_sharded(like):
        return value
    return part_like(value, like) if value.shape == like.shape else value
