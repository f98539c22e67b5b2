"""States of modules: compared with saved ones before anything is loaded, and brought into the form that loads.

``torch.compile`` puts a part into the keys, which checkpoints do not have. DTensors are saved whole, and distributed
again with the layout of the object that loads them. So a checkpoint of a compiled or tensor-parallel model is like any
other: it can be restored on a mesh of another shape, or by a model that is neither.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
from torch import nn

from paceline.core.state.unwrapping import plain_name
from paceline.core.torch_internals.distributed.dtensor import has_sharded, is_sharded, part_like
from paceline.errors import CheckpointMismatch


def without_compile(state: Any) -> Any:
    """Return `state` without the parts that ``torch.compile`` adds to keys; other kinds of state unchanged."""
    if not isinstance(state, dict) or not any("_orig_mod" in str(key) for key in state):
        return state
    return OrderedDict((_plain_path(key), value) for key, value in state.items())


def as_in(own_state: Any, state: Any) -> Any:
    """Return `state` with the keys of `own_state`, which may have other sub-modules compiled."""
    plain = without_compile(state)
    if (
        not isinstance(own_state, dict)
        or not isinstance(plain, dict)
        or not any("_orig_mod" in str(key) for key in own_state)
    ):
        return plain
    renamed = OrderedDict((key, plain[_plain_path(key)]) for key in own_state if _plain_path(key) in plain)
    known = {_plain_path(key) for key in own_state}
    renamed.update((key, value) for key, value in plain.items() if key not in known)
    return renamed


def _plain_path(name: str) -> str:
    """Return the name of a parameter or module without the parts that ``torch.compile`` puts into it."""
    return plain_name(f"{name}.").removesuffix(".")


def check_module(name: str, module: nn.Module, saved: Any, step: int) -> None:
    """Compare the state of `module` with the one `saved` in `step`; raise a CheckpointMismatch at the first difference.

    Parts of the module that load their state in their own way may take other keys and shapes, so their own loading
    decides.
    """
    remedy = "build the model that was saved, or choose another checkpoint folder"
    if not isinstance(saved, dict):
        raise CheckpointMismatch(f"{name!r} is a module, but no module was saved as it in step {step}; {remedy}")
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
        other = saved[key]
        # Extra state is only for the module's own set_extra_state().
        if key.endswith("_extra_state") or not (isinstance(value, torch.Tensor) or isinstance(other, torch.Tensor)):
            continue
        if not isinstance(value, torch.Tensor) or not isinstance(other, torch.Tensor):
            raise CheckpointMismatch(
                f"{key!r} of {name!r} is a {type(other).__name__} in the checkpoint of step {step} but a "
                f"{type(value).__name__} in this run; {remedy}"
            )
        if torch.nn.parameter.is_lazy(value) or (value.shape != other.shape and key.startswith(flexible)):
            continue
        if value.shape != other.shape:
            raise CheckpointMismatch(
                f"{kind} {key!r} of {name!r} has shape {tuple(other.shape)} in the checkpoint of step "
                f"{step} but {tuple(value.shape)} in this run; {remedy}"
            )
        if value.dtype != other.dtype:
            raise CheckpointMismatch(
                f"{kind} {key!r} of {name!r} has dtype {other.dtype} in the checkpoint of step {step} "
                f"but {value.dtype} in this run; {remedy}"
            )
    for key in saved:
        if key not in own_state and not key.startswith(flexible):
            raise CheckpointMismatch(
                f"the checkpoint of step {step} has {key!r} of {name!r}, which this run does not, or only as None; "
                f"{remedy}"
            )


def _has_own_loading(part: nn.Module) -> bool:
    """Return whether the class of `part`, or a hook on it, decides which states it takes."""
    # torch's own layers fill in what versions before them did not save, but take no other shapes.
    loads = (type(part)._load_from_state_dict, type(part).load_state_dict)
    is_plain = all(load.__module__.startswith("torch.nn.modules.") for load in loads)
    return not is_plain or bool(part._load_state_dict_pre_hooks)


def laid_out(own_state: Any, state: Any) -> Any:
    """Return a module's `state` with DTensors where its `own_state` has them, with the same layout."""
    if not isinstance(own_state, dict) or not isinstance(state, dict) or not has_sharded(own_state.values()):
        return state
    return OrderedDict((key, part_of(value, own_state.get(key))) for key, value in state.items())


def part_of(value: Any, like: Any) -> Any:
    """Return `value` with the layout of the DTensor `like`; `value` itself if `like` is none, or of another shape."""
    if not isinstance(value, torch.Tensor) or not isinstance(like, torch.Tensor) or not is_sharded(like):
        return value
    return part_like(value, like) if value.shape == like.shape else value
