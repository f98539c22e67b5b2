"""torch's NCCL backend: found in a process group, split from another one, aborted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, ProcessGroup, Store

_c10d: Any = dist.distributed_c10d


def nccl_of(group: Any) -> Any:
    """Return the NCCL backend that serves CUDA tensors in `group`; None if it has none."""
    if not dist.is_nccl_available():
        return None
    try:
        backend = group._get_backend(torch.device("cuda"))
    except RuntimeError:  # no backend for CUDA tensors
        return None
    while hasattr(backend, "wrapped_pg"):  # with TORCH_DISTRIBUTED_DEBUG=DETAIL
        backend = backend.wrapped_pg
    return backend if isinstance(backend, dist.ProcessGroupNCCL) else None


def attach_nccl(
    group: Any,
    parent: Any,
    ranks: Sequence[int],
    store: Store,
    name: str,
    timeout: timedelta,
) -> None:
    """Add a new NCCL communicator to `group`, for its CUDA tensors; `group` has the same `ranks` as `parent`.

    It is split from the parent's communicator if the parent is bound to a device, because then all ranks already have
    that communicator. All ranks call this together.
    """
    options: Any = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    options.global_ranks_in_group, options.group_name = list(ranks), name
    device, source = parent.bound_device_id, nccl_of(parent)
    is_split = device is not None and source is not None and source.supports_splitting
    if is_split:
        options.split_from, options.split_color = source, 0
    nccl = dist.ProcessGroupNCCL(PrefixStore("cuda/", store), group.rank(), group.size(), options)
    nccl._set_sequence_number_for_group()
    group._set_default_backend(ProcessGroup.BackendType.NCCL)
    group._register_backend(torch.device("cuda"), ProcessGroup.BackendType.NCCL, nccl)
    group._set_group_name(name)  # set after the backends are registered, because the group passes it to them
    group._set_group_desc("paceline")
    if is_split:
        torch.cuda.synchronize(device)  # NCCL can split only an idle communicator
        nccl.eager_connect_single_device(device)


@contextmanager
def grouped_aborts(nccl: Any) -> Iterator[None]:
    """Combine the block's aborts of communicators, so that they do not wait for each other."""
    if nccl is None:
        yield
        return
    nccl._group_start()
    try:
        yield
    finally:
        nccl._group_end()


def abort_known_groups() -> None:
    """Abort and remove every process group that torch knows, like ``destroy_process_group`` but without waiting."""
    _c10d._abort_process_group()
