"""Opens the native collectives of a group, as its ranks lie on hosts."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from datetime import timedelta

from paceline.comm.gloo import connect_gloo
from paceline.comm.multi_host import Hierarchy
from paceline.comm.shm import descriptors
from paceline.comm.shm.arena import Arena
from paceline.comm.shm.collectives import Collectives
from paceline.comm.shm.engine import Engine
from paceline.comm.shm.handshake import connect
from paceline.comm.topology import Refused, agree_on_hosts, rows_of
from paceline.rendezvous import private_store
from paceline.torch_internals.c10d import PrefixStore, Store


def agree_on_rows(
    store: Store, rank: int, size: int, timeout: timedelta, names: Sequence[int]
) -> list[list[int]] | None:
    """Find the ranks of each host; all ranks call this together, before they connect in any other way.

    Returns None where shared memory cannot be used or would not help; then one warning on rank 0 says why.

    Raises:
        UsageError: on every rank, if one has too few file descriptors for the group.
        CommunicationError: if a rank does not come in time.
    """
    descriptors.tell(store, rank)
    refused, rows = "", [list(range(size))]
    try:
        rows = rows_of(agree_on_hosts(store, rank, size, timeout))
    except Refused as reason:
        refused = str(reason)
    local = {member: len(row) for row in rows for member in row}
    descriptors.expect_enough(store, rank, [local[member] for member in range(size)], names)
    counts = [len(row) for row in rows]
    if len(rows) > 1 and max(counts) == 1:
        refused = f"each of the {size} ranks is on a host of its own"
    elif len(set(counts)) > 1:
        refused = f"the hosts have different numbers of ranks ({', '.join(map(str, counts))})"
    if refused and rank == 0:
        warnings.warn(f"the process group uses Gloo, not shared memory: {refused}", stacklevel=2)
    return None if refused else rows


def open_collectives(
    store: Store, rank: int, rows: Sequence[Sequence[int]], timeout: timedelta, names: Sequence[int]
) -> tuple[Engine, Collectives | Hierarchy]:
    """Open this rank's engine with the ranks of its host, and the collectives of all ranks; all call this together.

    Args:
        store: one that only this group uses.
        rank: this one.
        rows: as :func:`agree_on_rows` gave them.
        timeout: of the group.
        names: messages call rank r ``names[r]``.

    Raises:
        CommunicationError: if a rank ends or does not come.
    """
    host = next(number for number, row in enumerate(rows) if rank in row)
    arena = Arena(len(rows[host]))
    private = private_store(PrefixStore(f"inside/{host}/", store), rank, rows[host], timeout, names)
    peers = connect(private, rank, [other for other in rows[host] if other != rank], arena, timeout)
    engine = Engine(arena, peers, rank, timeout)
    inside = Collectives(engine)
    if len(rows) == 1:
        return engine, inside
    engine.reports_failures = True
    alike = [names[row[inside.place]] for row in rows]
    across = connect_gloo(PrefixStore(f"across/{inside.place}/", store), host, len(rows), timeout, alike)
    return engine, Hierarchy(inside, across, rows, names)
