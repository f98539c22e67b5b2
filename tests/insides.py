"""Inner parts at which tests look because nothing public shows what they prove.

Each private name is reached here alone: when code moves, this file follows it, and the tests stay as they are.
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
"""In this context, writes to the given tensors do not raise their autograd versions."""


def engine_of(model: DistributedDataParallel) -> Any:
    """Return what averages the gradients of `model`: among several ranks its reducer."""
    return model._engine


def storage_of(model: DistributedDataParallel) -> Any:
    """Return the buckets of `model`."""
    return engine_of(model).buckets


def connection_of(model: DistributedDataParallel) -> Any:
    """Return the parts of `model` that reach other ranks."""
    return model._connection


def channel_of(model: DistributedDataParallel) -> Any:
    """Return the channel that carries the gradients of `model`."""
    return connection_of(model).channel


def backward_of(model: DistributedDataParallel) -> Any:
    """Return the backward of `model` that is under way, or not settled; None between two."""
    return engine_of(model).backward


def pieces_in_use(group: Any) -> int:
    """Return how many pieces of a rank's shared memory are tensors, not copies that collectives show."""
    return len(group._collectives.engine.arena._used) - len(group._collectives._places._used)


def under_way(channel: Any) -> int:
    """Return how many collectives of `channel` were launched and not waited for."""
    return int(channel._outstanding.count)


def has_hook(parameter: nn.Parameter) -> bool:
    """Return whether something waits for the gradient of `parameter`."""
    return bool(parameter._post_accumulate_grad_hooks)  # type: ignore[attr-defined]


def metadata_of(state: Any) -> Any:
    """Return the versions that torch keeps beside a state dict."""
    return state._metadata


def step_in_backward(kind: type[torch.optim.Optimizer], parameters: Iterable[nn.Parameter], lr: float) -> None:
    """Have optimizers of `kind` step over `parameters` inside backward, as torch's users do by a private name."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it loads TorchScript
        from torch.distributed.optim import _apply_optimizer_in_backward

    _apply_optimizer_in_backward(kind, list(parameters), {"lr": lr})
