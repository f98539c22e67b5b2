"""Private parts of torch's DistributedDataParallel, of its ``join`` and of its communication hooks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch._C import Future as Future
from torch.distributed.algorithms.join import _JoinConfig
from torch.distributed.utils import _cast_forward_inputs, _to_kwargs
from torch.nn.utils.stateless import _reparametrize_module

from paceline.core.torch_internals.compile import never_compiled

AnyBatchNorm = nn.modules.batchnorm._BatchNorm
MixedPrecision = nn.parallel.distributed._MixedPrecision


def make_disabled_join() -> Any:
    """Make the ``_join_config`` of a wrapper that is outside ``join``."""
    return _JoinConfig.construct_disabled_join_config()


@never_compiled
def move_inputs(inputs: Sequence[Any], kwargs: Mapping[str, Any], device: torch.device) -> tuple[Any, Any]:
    """Return a forward's inputs with their tensors on `device`."""
    moved, moved_kwargs = _to_kwargs(inputs, kwargs, device, False)  # type: ignore[arg-type]
    return moved[0], moved_kwargs[0]


def cast_inputs(dtype: torch.dtype | None, inputs: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, Any]:
    """Return a forward's inputs with their floating-point tensors in `dtype`; None keeps their dtypes."""
    return _cast_forward_inputs(dtype, *inputs, **kwargs)


def replace_parameters(module: nn.Module, tensors: dict[str, Tensor]) -> AbstractContextManager[Any]:
    """In the block, replace parameters, including tied parameters, with the `tensors` of the same names."""
    context: AbstractContextManager[Any] = _reparametrize_module(module, tensors, tie_weights=True)
    return context
