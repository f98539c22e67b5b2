"""Replicas of modules without their parameters, similar to the replicas from ``torch.nn.parallel.replicate``."""

from __future__ import annotations

from torch import Tensor, nn


def bare_replica(module: nn.Module) -> nn.Module:
    """Return a shallow copy of one module, without its parameters; :func:`set_tensor` adds tensors instead."""
    replica: nn.Module = module._replicate_for_data_parallel()
    return replica


def set_tensor(replica: nn.Module, name: str, tensor: Tensor | None) -> None:
    """Set `tensor`, which autograd computed from a parameter, under that parameter's name."""
    if tensor is None:
        replica._parameters[name] = None
    else:
        setattr(replica, name, tensor)  # recurrent layers also add it to their list of weights
