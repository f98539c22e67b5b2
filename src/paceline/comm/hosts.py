"""Which ranks share a host, and the collectives that suit it."""

from __future__ import annotations

import warnings
from datetime import timedelta

from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed import ProcessGroupGloo

from paceline.comm.collectives import Collectives
from paceline.comm.engine import Engine
from paceline.comm.handshake import Refused, agree_on_hosts, connect
from paceline.comm.hierarchy import Hierarchy, rows_of
from paceline.comm.shared_memory import Arena
from paceline.rendezvous import private_store


def open_collectives(
    store: Store, rank: int, size: int, timeout: timedelta
) -> tuple[Engine, Collectives | Hierarchy] | None:
    """This rank's engine with the ranks of its host, and the collectives of all ranks; all call this together.

    None where shared memory cannot be used or would not help; then one warning on rank 0 says why.
    """
    try:
        rows = rows_of(agree_on_hosts(store, rank, size, timeout))
        counts = [len(row) for row in rows]
        if len(rows) > 1 and max(counts) == 1:
            raise Refused(f"each of the {size} ranks is on a host of its own")
        if len(set(counts)) > 1:
            raise Refused(f"the hosts have different numbers of ranks ({', '.join(map(str, counts))})")
    except Refused as refused:
        if rank == 0:
            warnings.warn(f"the process group uses Gloo, not shared memory: {refused}", stacklevel=2)
        return None
    host = next(number for number, row in enumerate(rows) if rank in row)
    arena = Arena(len(rows[host]))
    private = private_store(PrefixStore(f"inside/{host}/", store), rank, rows[host], timeout)
    peers = connect(private, rank, [other for other in rows[host] if other != rank], arena, timeout)
    engine = Engine(arena, peers, rank, timeout)
    inside = Collectives(engine)
    if len(rows) == 1:
        return engine, inside
    across = ProcessGroupGloo(PrefixStore(f"across/{inside.place}/", store), host, len(rows), timeout)
    return engine, Hierarchy(inside, across, rows)
