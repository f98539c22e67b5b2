"""The NCCL communicators of Paceline's own process groups, which all ranks destroy together.

``ncclCommDestroy`` is collective, but garbage collection runs at different times on each rank. The owner of a group
therefore only releases it. The group is destroyed at the next point that all its ranks reach anyway:

- when the same ranks open another group, if every rank has released it;
- in ``World.close()``, in the same order on every rank.

After an error it is aborted instead, without waiting for other ranks. See
``docs/decisions/0026-nccl-communicators.md``.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch.distributed import Store

from paceline.core.torch_distributed import abort_known_groups, grouped_aborts, nccl_of


@dataclass(eq=False)
class Communicator:
    """One of Paceline's process groups with NCCL."""

    group: Any
    """Process group; None if this rank has already closed it on its own."""
    ranks: tuple[int, ...]
    """World ranks of its members."""
    is_released: bool = False
    """Whether this rank no longer uses it. Finalizers set only this flag, because they may run at any time."""
    is_clean: bool = True
    """Whether this rank has waited for all collectives that it launched on the group."""
    process: int = field(default_factory=os.getpid)
    """Process that opened the group. A forked child has a copy of this object, but must not destroy the group."""


opened: dict[str, Communicator] = {}
"""Communicators by group name. All ranks of a group add and remove it at the same point, so they always hold the same
names."""


def keep(group: Any, name: str, ranks: Sequence[int]) -> None:
    """Keep a new group with NCCL until its ranks destroy it together."""
    if nccl_of(group) is not None:
        opened[name] = Communicator(group, tuple(ranks))


def release(group: Any, *, is_clean: bool) -> None:
    """Close a group that this rank no longer uses: later if it has an NCCL communicator, otherwise at once.

    Args:
        group: the group.
        is_clean: whether this rank has waited for all its collectives. Otherwise the group is aborted, because
            destroying it would wait for collectives that may never end.
    """
    entry = opened.get(group.group_name)
    if not _has_communicator(group):
        group.shutdown()
        if entry is not None:
            entry.group = None
    if entry is not None:
        entry.is_clean, entry.is_released = is_clean, True


def destroy_released(ranks: Sequence[int], rank: int, store: Store) -> None:
    """Destroy the groups of `ranks` that every member has released. All members call this together.

    `rank` is this rank's index in `ranks`; `store` must be new for each call.
    """
    entries = {name: entry for name, entry in opened.items() if entry.ranks == tuple(ranks)}
    if not entries:
        return
    local_flags = {name: entry.is_clean for name, entry in entries.items() if entry.is_released}
    store.set(f"released/{rank}", json.dumps(local_flags))
    # Rank 0 decides for all, because a finalizer may release another group at any moment.
    if rank == 0:
        reports = [json.loads(store.get(f"released/{peer}")) for peer in range(len(ranks))]
        agreed = sorted(set.intersection(*map(set, reports)))
        store.set("destroyed", json.dumps({name: all(released[name] for released in reports) for name in agreed}))
    for name, is_clean in json.loads(store.get("destroyed")).items():
        group = opened.pop(name).group
        if group is not None:
            group.shutdown() if is_clean else group.abort()


def destroy_all() -> None:
    """Destroy the remaining groups. All ranks of the world call this."""
    for group, is_clean in _all():
        group.shutdown() if is_clean else group.abort()


def abort_all() -> None:
    """Abort the remaining groups and all groups that torch knows, without waiting for other ranks."""
    groups = [group for group, _ in _all()]
    with grouped_aborts(next(filter(None, map(nccl_of, groups)), None)):
        for group in groups:
            group.abort()
        abort_known_groups()


def _all() -> list[tuple[Any, bool]]:
    """Remove and return the groups of this process, in an order that is the same on all ranks of each group.

    Groups without a communicator, such as all groups on a host without GPUs, remain with their owners.
    """
    remaining = [opened.pop(name) for name in sorted(opened)]
    owned = [entry for entry in remaining if entry.group is not None and entry.process == os.getpid()]
    return [(entry.group, entry.is_clean) for entry in owned if _has_communicator(entry.group)]


def _has_communicator(group: Any) -> bool:
    """Return whether NCCL has created a communicator for `group`, which happens no later than the first collective."""
    nccl = nccl_of(group)
    return nccl is not None and nccl._is_initialized()
