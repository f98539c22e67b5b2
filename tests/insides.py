"""Access to private state for tests that cannot check their claim through the public API.

Tests use private names only through this file, so only this file changes when code moves.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils._pytree import tree_map_only as tree_map_only

from paceline.ddp import DistributedDataParallel

keep_versions: Any = torch.autograd.grad_mode._unsafe_preserve_version_counter
"""Context in which writes to the given tensors do not increase their autograd version counters."""


def engine_of(model: DistributedDataParallel) -> Any:
    """Return the engine that averages the gradients of `model`; on several ranks, its reducer."""
    return model._engine


def storage_of(model: DistributedDataParallel) -> Any:
    """Return the buckets of `model`."""
    return engine_of(model).buckets


def channel_of(model: DistributedDataParallel) -> Any:
    """Return the channel that carries the gradients of `model`."""
    return model._connection.channel


def backward_of(model: DistributedDataParallel) -> Any:
    """Return the running or unsettled backward of `model`, or None between backwards."""
    return engine_of(model).backward


def pieces_in_use(group: Any) -> int:
    """Return the number of pieces of a rank's shared memory that are tensors, not copies exposed by collectives."""
    return len(group._collectives.engine.arena._used) - len(group._collectives._places._used)


def under_way(channel: Any) -> int:
    """Return the number of collectives of `channel` that were launched but not yet waited for."""
    return int(channel._outstanding.count)


def has_hook(parameter: nn.Parameter) -> bool:
    """Return whether `parameter` has a post-accumulate hook."""
    return bool(parameter._post_accumulate_grad_hooks)  # type: ignore[attr-defined]


def metadata_of(state: Any) -> Any:
    """Return torch's metadata of a state dict, which holds version numbers."""
    return state._metadata


def step_in_backward(kind: type[torch.optim.Optimizer], parameters: Iterable[nn.Parameter], lr: float) -> None:
    """Make optimizers of `kind` step over `parameters` inside backward, through torch's private function."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the import loads TorchScript
        from torch.distributed.optim import _apply_optimizer_in_backward

    _apply_optimizer_in_backward(kind, list(parameters), {"lr": lr})
