"""Opens the shared memory of a group, if its ranks are on one host."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from datetime import timedelta

from paceline.comm.shm import descriptors
from paceline.comm.shm.arena import Arena
from paceline.comm.shm.engine import Engine
from paceline.comm.shm.handshake import connect
from paceline.comm.topology import Refused, agree_on_hosts
from paceline.core.processes.private_store import private_store
from paceline.core.torch_internals.distributed.c10d import PrefixStore, Store


def agree_to_share(store: Store, rank: int, size: int, timeout: timedelta, names: Sequence[int]) -> bool:
    """Tell whether the ranks can share memory; all call this together, before they connect in any other way.

    Where they cannot, one warning on rank 0 says why.

    Raises:
        UsageError: on every rank, if one has too few file descriptors for the group.
        CommunicationError: if a rank does not come in time.
    """
    descriptors.publish(store, rank)
    refused = ""
    try:
        hosts = len(set(agree_on_hosts(store, rank, size, timeout)))
        if hosts > 1:
            refused = f"the {size} ranks are on {hosts} hosts"
    except Refused as reason:
        refused = str(reason)
    descriptors.check_enough(store, rank, 1 if refused else size, names)
    if refused and rank == 0:
        warnings.warn(f"the process group uses Gloo, not shared memory: {refused}", stacklevel=2)
    return not refused


def open_engine(store: Store, rank: int, size: int, timeout: timedelta, names: Sequence[int]) -> Engine:
    """Open this rank's engine with the other ranks of its host; all call this together.

    Args:
        store: one that only this group uses.
        rank: this one.
        size: how many there are.
        timeout: of the group.
        names: messages call rank r ``names[r]``.

    Raises:
        CommunicationError: if a rank ends or does not come.
    """
    ranks = range(size)
    arena = Arena(size)
    private = private_store(PrefixStore("inside/", store), rank, ranks, timeout, names)
    peers = connect(private, rank, [other for other in ranks if other != rank], arena, timeout)
    return Engine(arena, peers, rank, timeout)
