"""Opens the shared memory of a group, if its ranks are on one host and have enough file descriptors."""

from __future__ import annotations

import os
import resource
from collections.abc import Sequence
from datetime import timedelta

from torch.distributed import PrefixStore, Store

from paceline.comm.shm.arena import Arena
from paceline.comm.shm.engine import Engine
from paceline.comm.shm.handshake import connect
from paceline.comm.topology import Refused, agree_on_hosts
from paceline.core.processes.private_store import private_store
from paceline.core.telemetry.users_code import warn
from paceline.errors import UsageError


def agree_to_share(store: Store, rank: int, size: int, timeout: timedelta, names: Sequence[int]) -> bool:
    """Return whether the ranks can share memory. All ranks call this before they connect in any other way.

    If they cannot, rank 0 warns and says why.
    """
    # Publish before any rank connects, because Gloo's error does not mention file descriptors.
    limit, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    store.set(f"descriptors/{rank}", f"{limit} {limit - _open_now()} {hard_limit}")
    refused, local = "", size
    try:
        hosts = len(set(agree_on_hosts(store, rank, size, timeout)))
        if hosts > 1:
            refused, local = f"the {size} ranks are on {hosts} hosts", 1
    except Refused as reason:  # perhaps because a rank has too few descriptors for the attempt
        refused = str(reason)
    _check_descriptors(store, rank, local, names)
    if refused and rank == 0:
        warn(f"the process group uses Gloo, not shared memory: {refused}")
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
    ranks = range(size)
    arena = Arena(size)
    private = private_store(PrefixStore("inside/", store), rank, ranks, timeout, names)
    peers = connect(private, rank, [other for other in ranks if other != rank], arena, timeout)
    return Engine(arena, peers, rank, timeout)


def _check_descriptors(store: Store, rank: int, local: int, names: Sequence[int]) -> None:
    """Raise on every rank if any rank has too few descriptors for a group with `local` ranks that share memory."""
    size = len(names)
    # Gloo: a connection to every rank, and a few more. For each peer on this host: a pidfd, two eventfds, its memory
    # (duplicated by Python before 3.13), and a socket for the handshake.
    gloo, own_memory, handshake, spare = size + 4, 2, 2, 6
    count = gloo + own_memory + 5 * (local - 1) + handshake + spare
    entries = [store.get(f"descriptors/{peer}") for peer in range(size)]
    for peer, text in enumerate(entries):
        limit, free, hard_limit = map(int, text.split())
        if free < count:
            # Suggest twice as many, because each wrapper will create a group, and each DataLoader worker needs some.
            advice = max(1024, 2 * (limit - free + count))
            hard = f" (the hard limit is {hard_limit})" if 0 <= hard_limit < advice else ""
            raise UsageError(
                f"rank {names[rank]}: a process group of {size} ranks takes up to {count} file descriptors, but rank "
                f"{names[peer]} has {free} of its {limit} left; raise its limit with 'ulimit -n {advice}'{hard} in "
                "the shell that starts the ranks"
            )


def _open_now() -> int:
    try:
        return len(os.listdir("/dev/fd")) - 1  # without the descriptor used for listing
    except OSError:  # no descriptor is left
        return resource.getrlimit(resource.RLIMIT_NOFILE)[0]
