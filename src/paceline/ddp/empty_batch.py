"""Forward passes over the empty batch of a rank without samples."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from paceline.core.data_position import SKIP, emptied
from paceline.core.torch_internals import TorchDDP, call_module, never_compiled, tree_map
from paceline.core.unwrapping import Communicates
from paceline.ddp.backward import tensors_in
from paceline.ddp.connection import Replica
from paceline.ddp.virtual_ranks import SavedBuffers
from paceline.errors import PacelineError, UsageError

SHARED = nn.SyncBatchNorm, Communicates
"""Layers that compute their outputs and buffers from the samples of all ranks."""


@never_compiled
def have_no_rows(inputs: Any, kwargs: Any) -> bool:
    """Return whether these may be the inputs from an empty batch.

    They are not if the script has fetched the empty batch ahead and is still working on an earlier one.
    """
    tensors = tensors_in((inputs, kwargs))
    # The first tensor decides; they are in reverse order.
    return tensors[-1].numel() == 0 if tensors else not (any(inputs) or any(kwargs.values()))


@contextmanager
@never_compiled
def on_empty_slice(replica: Replica) -> Iterator[None]:
    """Keep the buffers, and mark the forward pass as empty."""
    modules = replica.module.modules()
    shared = {(id(part), name) for part in modules if isinstance(part, SHARED) for name in part._buffers}
    buffers = SavedBuffers(replica.module, shared)
    replica.ledger.is_on_empty_slice = True
    try:
        yield
    finally:
        replica.ledger.is_on_empty_slice = False
        buffers.restore()


@never_compiled
def call_without_rows(
    wrapper: TorchDDP | None, module: nn.Module, inputs: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """Call `module` on 0 rows; if it raises an exception, call it on a few constant rows, and cut its outputs."""
    try:
        return call_module(wrapper, module, inputs, kwargs)
    except PacelineError:
        raise
    except Exception as error:
        if not any(isinstance(part, SHARED) and part.training for part in module.modules()):
            for value in 0, 1:  # 0 is an index into any table, but not the length of a packed sequence
                filled = (tree_map(partial(_with_rows, rows, value), (inputs, kwargs)) for rows in (2, 3))
                with suppress(Exception):
                    few, more = (call_module(wrapper, module, *arguments) for arguments in filled)
                    return emptied(few, more, [], [])
        raise UsageError(
            f"rank {dist.get_rank()} has no samples in this batch, which has fewer samples than there are ranks, and "
            f"the model fails on this rank's empty batch ({type(error).__name__}: {error}); make it take 0 rows, {SKIP}"
        ) from error


def _with_rows(rows: int, value: int, argument: Any) -> Any:
    if not isinstance(argument, Tensor) or argument.numel():
        return argument
    filled = argument.new_full([size or rows for size in argument.shape], value)
    # Keep the graph, so that backward also reaches the wrapper that computed the argument.
    return filled + argument.sum() if argument.requires_grad else filled
