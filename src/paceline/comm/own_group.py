"""Process groups of our own among the ranks of a given group, made by its members alone.

torch's ``new_group`` must be called by the whole world, or it names the group after the number of groups that this
process has. Members with different numbers of groups then wait for each other under different names. Here the members
agree on a name.

torch does not know such a group. If it did, it would count it. Ranks may have different numbers of wrappers, or collect
them at different times, so torch's names for the user's groups would differ between ranks.

Decision 0014 says why.
"""

from __future__ import annotations

import warnings
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from paceline.comm.forking import keep_in_children
from paceline.core.processes.nccl_communicators import destroy_released, keep
from paceline.core.processes.store_epochs import connecting, meet
from paceline.core.torch_internals.distributed.c10d import (
    PrefixStore,
    forget_group,
    get_default_timeout,
    get_known_groups,
    open_group,
)
from paceline.core.torch_internals.distributed.nccl import attach_nccl, bare_group

NCCL = ("nccl", "cuda:nccl")
"""Parts of a backend's name that mean NCCL for CUDA tensors."""


def open_own_group(
    group: dist.ProcessGroup, backend: str, timeout: timedelta | None, *, high_priority: bool = False
) -> Any:
    """Open a process group of the ranks of `group`, in their order; all of them call this together.

    The caller passes it to :func:`paceline.core.processes.nccl_communicators.release` in the end.

    Args:
        group: the given group.
        backend: a name for ``torch.distributed.new_group``. An NCCL communicator is split from that of `group` if that
            is bound to a device, and only its ranks take part. (torch would split it from the world's, for which all
            ranks of the world would have to come.)
        timeout: the timeout of its collectives, and of opening it; None for torch's default.
        high_priority: whether NCCL runs on a stream of high priority.
    """
    ranks, store = dist.get_process_group_ranks(group), get_known_groups()[group][1]
    timeout = timeout or get_default_timeout(backend)
    number = meet(store, group.rank(), group.size(), timeout, ranks)
    name = f"{group.group_name}/own/{number}"
    place = PrefixStore(f"{name}/", store)
    # Here, because all ranks of the group have come, and NCCL destroys a communicator only with all of its ranks.
    destroy_released(ranks, group.rank(), place)
    on_cpu = ",".join(part for part in backend.split(",") if part not in NCCL)
    if on_cpu:
        # `group` has given this warning, or is of GPUs, for whose user it means nothing.
        with warnings.catch_warnings(), connecting(place, group.rank(), group.size(), timeout, ranks):
            warnings.filterwarnings("ignore", message="the process group uses Gloo")
            opened = open_group(group, ranks, on_cpu, store, name, timeout)
        forget_group(opened, name)
    else:
        opened = bare_group(place, group.rank(), group.size())
    if on_cpu != backend:
        attach_nccl(opened, group, ranks, place, name, timeout, high_priority=high_priority)
    keep(opened, name, ranks)
    keep_in_children(opened)
    keep_in_children(group)  # torch forgets it once it is destroyed, and a fork may come after that
    return opened


def is_alive(group: dist.ProcessGroup) -> bool:
    """Return whether `group`, which torch made, has not been destroyed."""
    return group in get_known_groups()
