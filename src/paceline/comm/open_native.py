"""Opens the shared memory of a group, if its ranks are on one host and have enough file descriptors."""

from __future__ import annotations

import json
import os
import resource
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from torch.distributed import PrefixStore, Store

from paceline.comm.handshake import connect
from paceline.comm.shm_arena import Arena
from paceline.comm.shm_engine import Engine
from paceline.comm.topology import Refused, memory_identity
from paceline.core.missing_ranks import read_from
from paceline.core.stacks import warn
from paceline.core.stores import private_store
from paceline.errors import UsageError


def agree_to_share(store: Store, rank: int, size: int, timeout: timedelta, names: Sequence[int]) -> bool:
    """Return whether the ranks can share memory. All ranks call this before they connect in any other way.

    If they cannot, rank 0 warns and says why.
    """
    # Publish before any rank connects, because Gloo's error does not mention file descriptors.
    limit, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    own: dict[str, Any] = {"limit": limit, "free": limit - _open_now(), "hard_limit": hard_limit}
    try:
        own["host"] = memory_identity(rank, size)
    except Refused as reason:  # perhaps because this rank has too few descriptors for the attempt
        own["refused"] = str(reason)
    store.set(f"host/{rank}", json.dumps(own))
    entries = [json.loads(read_from(store, f"host/{r}", names[rank], names[r], timeout)) for r in range(size)]
    refused = [
        f"rank {name}: {entry['refused']}" for name, entry in zip(names, entries, strict=True) if "refused" in entry
    ]
    hosts, local = len({entry.get("host") for entry in entries}), size
    if hosts > 1 and not refused:
        refused, local = [f"the {size} ranks are on {hosts} hosts"], 1
    _check_descriptors(entries, rank, local, names)
    if refused and rank == 0:
        warn(f"the process group uses Gloo, not shared memory: {refused[0]}")
    return not refused


def open_engine(store: Store, rank: int, size: int, timeout: timedelta, names: Sequence[int]) -> Engine:
    """Open this rank's engine together with the other ranks of its host, which all call this.

    Args:
        store: a store that only this group uses.
        rank: this rank.
        size: the number of ranks.
        timeout: how long to wait for a rank, now and in every collective.
        names: error messages call rank r ``names[r]``.
    """
    arena = Arena(size)
    private = private_store(PrefixStore("inside/", store), rank, range(size), timeout, names)
    return Engine(arena, connect(private, rank, arena, timeout, names), rank, timeout, names)


def _check_descriptors(entries: Sequence[dict[str, Any]], rank: int, local: int, names: Sequence[int]) -> None:
    """Raise on every rank if any rank has too few descriptors for a group with `local` ranks that share memory."""
    size = len(names)
    # Gloo: a connection to every rank, and a few more. For each peer on this host: a pidfd, two eventfds, its memory
    # (duplicated by Python before 3.13), and a socket for the handshake.
    gloo, own_memory, handshake, spare = size + 4, 2, 2, 6
    count = gloo + own_memory + 5 * (local - 1) + handshake + spare
    for name, entry in zip(names, entries, strict=True):
        limit, free, hard_limit = entry["limit"], entry["free"], entry["hard_limit"]
        if free < count:
            # Suggest twice as many, because each wrapper will create a group, and each DataLoader worker needs some.
            advice = max(1024, 2 * (limit - free + count))
            hard = f" (the hard limit is {hard_limit})" if 0 <= hard_limit < advice else ""
            raise UsageError(
                f"rank {names[rank]}: a process group of {size} ranks takes up to {count} file descriptors, but rank "
                f"{name} has {free} of its {limit} left; raise its limit with 'ulimit -n {advice}'{hard} in "
                "the shell that starts the ranks"
            )


def _open_now() -> int:
    try:
        return len(os.listdir("/dev/fd")) - 1  # without the descriptor used for listing
    except OSError:  # no descriptor is left
        return resource.getrlimit(resource.RLIMIT_NOFILE)[0]
