"""DTensors in states: saved whole, and distributed again with the layout of the object that loads them.

A checkpoint of tensor parallelism is therefore like any other. It can be restored on a mesh of another shape, or by a
model that is not parallelized.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch

from paceline.core.torch_internals.distributed.dtensor import has_sharded, is_sharded, part_like


def parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return the parameters of `optimizer`, in the order of the indices in its state."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def of_module(own_state: Any, state: Any) -> Any:
    """Return a module's `state` with DTensors where its `own_state` has them, with the same layout."""
    if not isinstance(own_state, dict) or not isinstance(state, dict) or not has_sharded(own_state.values()):
        return state
    return OrderedDict((key, _laid_out(value, own_state.get(key))) for key, value in state.items())


def of_optimizer(optimizer: torch.optim.Optimizer, state: Any) -> Any:
    """Return the `state` of `optimizer` with DTensors where its parameters are DTensors, with the same layout."""
    own = parameters(optimizer)
    if not has_sharded(own) or not isinstance(state, dict):
        return state
    entries = {
        index: {name: _laid_out(value, own[index]) for name, value in entry.items()}
        if isinstance(index, int) and index < len(own) and isinstance(entry, Mapping)
        else entry
        for index, entry in state["state"].items()
    }
    return {**state, "state": entries}


def _laid_out(value: Any, like: Any) -> Any:
    if not isinstance(value, torch.Tensor) or not isinstance(like, torch.Tensor) or not is_sharded(like):
        return value
    return part_like(value, like) if value.shape == like.shape else value
