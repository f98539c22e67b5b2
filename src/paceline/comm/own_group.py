"""Paceline's own process groups, created by the members of a given group.

All ranks of the world must call torch's ``new_group``; otherwise it derives the group's name from the number of groups
in this process, which may differ between members. Here the members agree on a name.

The groups are not registered with torch, because torch would count them. Ranks may have different numbers of wrappers,
or garbage-collect them at different times, so torch's names for the user's groups would differ between ranks. See
decision 0014.
"""

from __future__ import annotations

import warnings
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import PrefixStore, ProcessGroup, Store
from torch.distributed.constants import default_pg_nccl_timeout, default_pg_timeout

from paceline.comm.forking import keep_in_children
from paceline.core import OWN_BACKEND
from paceline.core.nccl_communicators import destroy_released, keep
from paceline.core.stores import connecting, meet
from paceline.core.torch_distributed import attach_nccl, forget_group, get_known_groups, open_group

NCCL = ("nccl", "cuda:nccl")
"""Parts of a backend name that select NCCL for CUDA tensors."""


def open_own_group(group: dist.ProcessGroup, backend: str, timeout: timedelta | None) -> Any:
    """Open a process group with the ranks of `group`, in the same order. All of them call this together.

    When the group is no longer needed, the caller passes it to
    :func:`paceline.core.nccl_communicators.release`.

    Args:
        group: the given group.
        backend: a name for ``torch.distributed.new_group``. An NCCL communicator is split from `group`'s if that is
            bound to a device, so that only the group's ranks take part; torch would split it from the world's.
        timeout: the timeout for opening the group and for its collectives; None for torch's default.
    """
    ranks, store = dist.get_process_group_ranks(group), get_known_groups()[group][1]
    timeout = timeout or (default_pg_nccl_timeout if backend == "nccl" else None) or default_pg_timeout
    number = meet(store, group.rank(), group.size(), timeout, ranks)
    name = f"{group.group_name}/own/{number}"
    place = PrefixStore(f"{name}/", store)
    # All ranks of the group have arrived, which NCCL requires for destroying a communicator.
    destroy_released(ranks, group.rank(), place)
    on_cpu = ",".join(part for part in backend.split(",") if part not in NCCL)
    if on_cpu:
        # `group` has already given this warning, unless it uses only GPUs, and then the warning is irrelevant.
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="the process group uses Gloo")
            opened = _open_on_cpu(group, ranks, on_cpu, store, name, timeout)
    else:
        opened = ProcessGroup(place, group.rank(), group.size())  # not in torch's tables
    if on_cpu != backend:
        attach_nccl(opened, group, ranks, place, name, timeout)
    keep(opened, name, ranks)
    keep_in_children(opened)
    keep_in_children(group)  # torch forgets a destroyed group, and a fork may follow
    return opened


def _open_on_cpu(
    group: dist.ProcessGroup, ranks: list[int], backend: str, store: Store, name: str, timeout: timedelta
) -> Any:
    place = PrefixStore(f"{name}/", store)
    if backend == OWN_BACKEND:
        from paceline.comm.process_group import create  # scripts that use another backend do not import it

        opened = create(place, group.rank(), group.size(), timeout, ranks, delegates=False)
        opened.own_name = name
        return opened
    with connecting(place, group.rank(), group.size(), timeout, ranks):
        opened = open_group(group, ranks, backend, store, name, timeout)
    forget_group(opened, name)
    return opened
