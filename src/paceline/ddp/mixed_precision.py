"""``mixed_precision``: low-precision computation with full-precision weights and gradients, as in torch's DDP.

Decision 0009 gives the reasons.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from paceline.core.torch_distributed import MixedPrecision, cast_inputs, replace_parameters
from paceline.ddp.options import check_reduce_dtype
from paceline.errors import UsageError


class LowPrecision:
    """Casts a module and its inputs according to a ``_MixedPrecision`` policy; buffers are cast once, as in torch.

    During forward, every parameter is replaced with a low-precision copy. The copy is made by a differentiable
    operation, so gradients arrive at the parameters in the parameters' dtype. Buckets cast them to ``reduce_dtype`` for
    communication.

    This cannot be combined with activation checkpointing inside the module: when backward recomputes a forward, the
    parameters have full precision again, and torch raises an error. Use ``torch.autocast`` instead.
    """

    reduce_dtype: torch.dtype | None
    """The dtype for summing gradients; None for each parameter's own."""

    def __init__(self, policy: Any, reduce_dtype: torch.dtype | None) -> None:
        if not isinstance(policy, MixedPrecision):
            raise UsageError(
                f"DistributedDataParallel(mixed_precision={policy!r}) takes torch.nn.parallel.distributed."
                "_MixedPrecision; for autocast, put torch.autocast around forward and leave it out"
            )
        if policy.reduce_dtype is not None and reduce_dtype is not None:
            raise UsageError("give reduce_dtype to DistributedDataParallel or to its mixed_precision, not to both")
        self._dtype, self._buffer_dtype = policy.param_dtype, policy.buffer_dtype
        self.reduce_dtype = check_reduce_dtype(policy.reduce_dtype or reduce_dtype or policy.param_dtype)

    def cast_buffers(self, module: nn.Module, ignored: set[str]) -> None:
        for name, buffer in module.named_buffers():
            if self._buffer_dtype is not None and buffer.is_floating_point() and name not in ignored:
                buffer.data = buffer.to(self._buffer_dtype)

    def cast_inputs(self, inputs: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, Any]:
        """Return the inputs with their floating-point tensors cast to low precision."""
        return cast_inputs(self._dtype, inputs, kwargs)

    def cast_parameters(self, module: nn.Module, ignored: set[str]) -> AbstractContextManager[Any]:
        """Return a context manager that casts parameters to low precision for a forward pass.

        Tied parameters stay tied.
        """
        if self._dtype is None:
            return nullcontext()
        named = module.named_parameters()
        # The cast is differentiable; its backward casts the gradients to the parameters' dtype.
        cast = {name: p.to(self._dtype) for name, p in named if p.is_floating_point() and name not in ignored}
        return replace_parameters(module, cast)
