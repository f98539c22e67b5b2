"""The NCCL communicators of process groups of our own, which all their ranks destroy together.

``ncclCommDestroy`` is collective, but garbage collectors run on each rank at different times. So the owner of such a
group only releases it. It is destroyed where all its ranks come anyway:

- when the same ranks open another group: those that every rank has released by then;
- in ``World.close()``: all that are left, in the same order on every rank.

After an error they are aborted instead, which waits for no one. ``docs/decisions/0026-nccl-communicators.md`` says why.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from paceline.core.torch_internals.distributed.c10d import Store
from paceline.core.torch_internals.distributed.nccl import grouped_aborts, nccl_of


@dataclass(eq=False)
class Communicator:
    """A group of our own with NCCL in it."""

    group: Any
    """Process group; None once it is closed, if this rank could do that alone."""
    ranks: tuple[int, ...]
    """Ranks of the world that are its members."""
    is_released: bool = False
    """Whether this rank uses it no more. Set by finalizers, which may run at any time and so change nothing else."""
    is_clean: bool = True
    """Whether all collectives that this rank launched on it were waited for."""
    process: int = field(default_factory=os.getpid)
    """Process that opened it. A forked child has a copy of this object, and must destroy nothing."""


opened: dict[str, Communicator] = {}
"""Communicators by the name of the group, on which its ranks agreed. All ranks of a group enter and remove it at the
same point, so that they always hold the same names."""


def keep(group: Any, name: str, ranks: Sequence[int]) -> None:
    """Keep a new group until its ranks destroy it together. Does nothing for a group without NCCL."""
    if nccl_of(group) is not None:
        opened[name] = Communicator(group, tuple(ranks))


def release(group: Any, *, is_clean: bool) -> None:
    """Close a group of our own, which this rank uses no more: at once if it has no communicator of NCCL, else later.

    Args:
        group: the group.
        is_clean: whether all collectives launched on it were waited for. If not, it will be aborted, because destroying
            it would wait for collectives that may never end.
    """
    kept = opened.get(group.group_name)
    if not _has_communicator(group):
        group.shutdown()
        if kept is not None:
            kept.group = None
    if kept is not None:
        kept.is_clean, kept.is_released = is_clean, True


def destroy_released(ranks: Sequence[int], rank: int, store: Store) -> None:
    """Destroy the groups of `ranks` that all of them have released. All of them call this together.

    `rank` is this one's index in `ranks`; `store` is one in which they have not called this before.
    """
    ours = {name: kept for name, kept in opened.items() if kept.ranks == tuple(ranks)}
    if not ours:
        return
    mine = {name: kept.is_clean for name, kept in ours.items() if kept.is_released}
    store.set(f"released/{rank}", json.dumps(mine))
    # Rank 0 decides for all: a finalizer may release another group between two looks.
    if rank == 0:
        everyone = [json.loads(store.get(f"released/{other}")) for other in range(len(ranks))]
        agreed = sorted(set.intersection(*map(set, everyone)))
        store.set("destroyed", json.dumps({name: all(released[name] for released in everyone) for name in agreed}))
    for name, is_clean in json.loads(store.get("destroyed")).items():
        group = opened.pop(name).group
        if group is not None:
            group.shutdown() if is_clean else group.abort()


def destroy_all() -> None:
    """Destroy every group that is left. All ranks of the world call this."""
    for group, is_clean in _all():
        group.shutdown() if is_clean else group.abort()


@contextmanager
def aborting() -> Iterator[None]:
    """Abort every group that is left, and those that the block aborts, without waiting for other ranks."""
    groups = [group for group, _ in _all()]
    with grouped_aborts(next(filter(None, map(nccl_of, groups)), None)):
        for group in groups:
            group.abort()
        yield


def _all() -> list[tuple[Any, bool]]:
    """Remove and return the groups of this process, in an order that is the same on all ranks of each of them.

    Groups without a communicator are left to their owners, such as all groups on a host without GPUs.
    """
    left = [opened.pop(name) for name in sorted(opened)]
    ours = [kept for kept in left if kept.group is not None and kept.process == os.getpid()]
    return [(kept.group, kept.is_clean) for kept in ours if _has_communicator(kept.group)]


def _has_communicator(group: Any) -> bool:
    """Return whether NCCL has a communicator for `group`; it makes one for the first tensor, if not before."""
    nccl = nccl_of(group)
    return nccl is not None and nccl._is_initialized()
