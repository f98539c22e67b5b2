"""Forward passes over the empty batch of a rank without samples."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import nn

from paceline.core.state.unwrapping import Communicates
from paceline.core.torch_internals.compile import never_compiled
from paceline.ddp.engine.replica import Replica
from paceline.ddp.reducer.forwards import tensors_in
from paceline.ddp.slices.buffers import SavedBuffers
from paceline.errors import PacelineError, UsageError


@never_compiled
def have_no_rows(inputs: Any, kwargs: Any) -> bool:
    """Return whether these may be the inputs from an empty batch.

    They are not if the script has fetched the empty batch ahead and is still working on an earlier one.
    """
    tensors = tensors_in((inputs, kwargs))
    if tensors:
        return tensors[-1].numel() == 0  # the first one, because they are in reverse order
    return not (any(inputs) or any(kwargs.values()))


@contextmanager
@never_compiled
def on_empty_slice(replica: Replica) -> Iterator[None]:
    """Keep the buffers, mark the forward pass as empty, and explain an error of the module."""
    shared = nn.SyncBatchNorm, Communicates  # these layers compute their buffers from the samples of all ranks
    parts = [part for part in replica.module.modules() if isinstance(part, shared)]
    buffers = SavedBuffers(replica.module, {(id(part), name) for part in parts for name in part._buffers})
    replica.ledger.is_on_empty_slice = True
    try:
        yield
    except PacelineError:
        raise
    except Exception as error:
        raise UsageError(
            f"rank {dist.get_rank()} has no samples in this batch, which has fewer samples than there are ranks, and "
            f"the model fails on this rank's empty batch ({type(error).__name__}: {error}); make it take 0 rows, call "
            "model.sync_gradients() instead of forward and backward if loader.slice_is_empty, or give drop_last=True"
        ) from error
    finally:
        replica.ledger.is_on_empty_slice = False
        buffers.restore()
